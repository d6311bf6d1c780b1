"""Cases of projections with fused epilogues: layers of models at few tokens."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

import echokernels
from bench import formulas, inputs
from bench.case import Case, Inputs, Outputs, returning
from bench.checks import against
from bench.inputs import randn, split_heads
from bench.suites import Layer, Suite

EPS = 1e-6
BF16 = 2  # bytes of an element
ROUNDED_THRICE = 2e-2  # separate kernels round the projection, its norm and its rotation


def projections(s: Suite) -> list[Case]:
    cases = (_fused_gate_up, _fused_qkv_rope)
    shapes = product(cases, s.layers.items(), s.few_tokens)
    return [case(name, layer, tokens) for case, (name, layer), tokens in shapes]


def _fused_gate_up(name: str, layer: Layer, tokens: int) -> Case:
    rows = 2 * layer.intermediate
    return Case(
        "fused_gate_up",
        f"{name}_T{tokens}",
        make=lambda d: (randn(d, tokens, layer.hidden), _weight(d, rows, layer.hidden)),
        run=echokernels.fused_gate_up,
        check=against(_gate_up),
        tolerance=ROUNDED_THRICE,
        num_bytes=(rows * layer.hidden + tokens * (layer.hidden + layer.intermediate)) * BF16,
        ceiling="read",
        peers={
            "torch": returning(_gate_up),
            "linear+echo": returning(lambda x, weight: echokernels.silu_and_mul(linear(x, weight))),
        },
    )


def _gate_up(x: Tensor, weight: Tensor) -> Tensor:
    return formulas.silu_and_mul(linear(x, weight))


def _fused_qkv_rope(name: str, layer: Layer, tokens: int) -> Case:
    heads, kv_heads, head_dim = layer.heads, layer.kv_heads, layer.head_dim
    rows = (heads + 2 * kv_heads) * head_dim

    def make(device: torch.device) -> Inputs:
        _, positions, table, *norms, eps, k_cache, v_cache, slots = inputs.projected(
            device, tokens, heads, kv_heads, head_dim, EPS
        )
        if not layer.qk_norm:
            norms = [None, None]
        x, weight = randn(device, tokens, layer.hidden), _weight(device, rows, layer.hidden)
        return x, weight, positions, table, *norms, eps, k_cache, v_cache, slots

    return Case(
        "fused_qkv_rope",
        f"{name}_T{tokens}",
        make=make,
        run=partial(with_epilogue, echokernels.fused_qkv_rope, layer),
        check=against(_qkv_rope),
        tolerance=ROUNDED_THRICE,
        num_bytes=(rows * layer.hidden + tokens * (layer.hidden + rows)) * BF16,
        ceiling="read",
        peers={
            "torch": returning(_qkv_rope),
            "linear+echo": returning(partial(with_epilogue, _linear_then_epilogue, layer)),
        },
    )


def with_epilogue(op: Callable[..., Tensor], shape: Layer | Suite, *inputs: Any) -> Outputs:
    """Calls `op`, which ends as `fused_qk_norm_rope_cache` does, and returns what attention over
    the pages reads: the query and both caches. `inputs` end as those of `inputs.projected` do.
    """
    *sources, positions, table, q_weight, k_weight, eps, k_cache, v_cache, slots = inputs
    qkv = op(
        *sources,
        positions,
        table,
        q_weight=q_weight,
        k_weight=k_weight,
        eps=eps,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        k_cache=k_cache,
        v_cache=v_cache,
        slot_mapping=slots,
    )
    return split_heads(qkv, k_cache)[0], k_cache, v_cache


def _linear_then_epilogue(x: Tensor, weight: Tensor, *args: Any, **options: Any) -> Tensor:
    return echokernels.fused_qk_norm_rope_cache(linear(x, weight), *args, **options)


def _qkv_rope(x: Tensor, weight: Tensor, *epilogue: Any) -> Outputs:
    return formulas.fused_qk_norm_rope_cache(linear(x, weight), *epilogue)


def _weight(device: torch.device, rows: int, columns: int) -> Tensor:
    """Its products with a random x have a standard deviation of 1."""
    return randn(device, rows, columns) / columns**0.5
