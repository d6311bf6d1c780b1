"""Cases of decode from an INT8 cache: codes with a scale for each token and KV head."""

from typing import Any

import torch
from torch import Tensor

import echokernels
from bench import formulas, inputs
from bench.case import Case, Inputs, Outputs, Peer, returning
from bench.checks import against
from bench.prefill import ATTENTION, BF16
from bench.suites import Decode, Suite
from bench.timing import Call
from echokernels.attention._path import forced_path

OP = "paged_attention_int8"
SCALE = 4  # bytes


def decodes_int8(s: Suite) -> list[Case]:
    return [_case(contexts) for contexts in s.decode_int8]


def _case(contexts: Decode) -> Case:
    lens, heads, head_dim = contexts.lens, contexts.heads, contexts.head_dim
    row = head_dim + SCALE
    return Case(
        OP,
        contexts.full_name,
        make=lambda device: _make(device, contexts),
        run=_run,
        check=against(_formula),
        tolerance=ATTENTION,
        num_bytes=2 * (sum(lens) * contexts.kv_heads * row + len(lens) * heads * head_dim * BF16),
        num_flops=4 * sum(lens) * heads * head_dim,
        ceiling="read",
        peers={
            "echo-bf16": Peer(_from_bf16),
            "echo-portable": Peer(returning(_run).prepare, lambda: forced_path("portable")),
        },
    )


def _make(device: torch.device, contexts: Decode) -> Inputs:
    """The arguments of `_run`."""
    q, *caches, block_table, seqused_k = inputs.contexts(
        device, list(contexts.lens), contexts.heads, contexts.kv_heads, contexts.head_dim, 1,
        contexts.page_size,
    )  # fmt: skip
    (k, k_scale), (v, v_scale) = (_quantised(cache) for cache in caches)
    return q, k, v, block_table, seqused_k, k_scale, v_scale


def _quantised(cache: Tensor) -> tuple[Tensor, Tensor]:
    # Page by page: the whole cache in fp32 would not fit beside it.
    codes = torch.empty_like(cache, dtype=torch.int8)
    scale = torch.empty(cache.shape[:3], device=cache.device)
    for part, part_codes, part_scale in zip(
        cache.split(4096), codes.split(4096), scale.split(4096), strict=True
    ):
        part_scale.copy_((part.float().abs().amax(-1) / 127).clamp_min(1e-12))
        part_codes.copy_((part.float() / part_scale[..., None]).round())
    return codes, scale


def _dequantised(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty_like(codes, dtype=dtype)
    for part, part_codes, part_scale in zip(
        out.split(4096), codes.split(4096), scale.split(4096), strict=True
    ):
        part.copy_(part_codes * part_scale[..., None])
    return out


def _run(
    q: Tensor, k: Tensor, v: Tensor, block_table: Tensor, seqused_k: Tensor, k_scale: Tensor,
    v_scale: Tensor,
) -> Outputs:  # fmt: skip
    return echokernels.paged_attention(
        q, k, v, block_table, seqused_k, k_scale=k_scale, v_scale=v_scale
    )


def _from_bf16(*arguments: Any) -> Call:
    """Our decode of a bf16 cache of the same tokens."""
    q, k, v, block_table, seqused_k, k_scale, v_scale = arguments
    k, v = (_dequantised(*pair, q.dtype) for pair in ((k, k_scale), (v, v_scale)))
    return lambda: echokernels.paged_attention(q, k, v, block_table, seqused_k)


def _formula(*arguments: Any) -> Tensor:
    q, k, v, block_table, seqused_k, k_scale, v_scale = arguments
    sequences = zip(
        inputs.context_sequences(q, k, v, block_table, seqused_k),
        inputs.context_sequences(q, k_scale, v_scale, block_table, seqused_k),
        strict=True,
    )
    return torch.cat(
        [
            formulas.attention(query, k * k_scale[..., None], v * v_scale[..., None], True, -1)
            for (query, k, v), (_, k_scale, v_scale) in sequences
        ]
    )
