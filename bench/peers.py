"""What ours is compared with: the formula, eager and compiled; PyTorch's fused attention; four
kernels instead of one. Those of other libraries are in `libraries.py`.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import echokernels
from bench.case import Outputs, Peer, mutating, returning
from bench.inputs import Sequence, split_heads
from bench.timing import Call

_SDPA_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "math": SDPBackend.MATH,
}


def formula_peers(
    formula: Callable[..., Outputs], compile_modes: tuple[str, ...], suffix: str = ""
) -> dict[str, Peer]:
    """`torch`, and one `compile` for each mode."""
    peers = {f"torch{suffix}": returning(formula)}
    for mode in compile_modes:
        name = "compile" if mode == "default" else f"compile-{mode}"
        # With fullgraph a fallback to eager is an error and not a slow figure.
        compiled = torch.compile(formula, fullgraph=True, dynamic=False, mode=mode)
        peers[name + suffix] = returning(compiled)
    return peers


def sdpa_peers(
    backends: tuple[str, ...],
    sequences: Callable[..., Iterable[Sequence]],
    *,
    causal: bool,
    suffix: str = "",
) -> dict[str, Peer]:
    """scaled_dot_product_attention of the sequences: of one length, and stacked beforehand."""

    def prepare(*inputs: object) -> Call:
        stacked = map(torch.stack, zip(*sequences(*inputs), strict=True))
        q, k, v = (x.transpose(1, 2) for x in stacked)  # views [num_seqs, heads, tokens, head_dim]
        return lambda: functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, enable_gqa=True
        ).transpose(1, 2)

    return {
        f"sdpa-{name}{suffix}": Peer(prepare, partial(sdpa_kernel, _SDPA_BACKENDS[name]))
        for name in backends
    }


def flex_peer(sequences: Callable[..., Iterable[Sequence]], *, causal: bool) -> Peer:
    """FlexAttention, compiled, of the sequences: of one length, and stacked beforehand."""

    def prepare(*inputs: object) -> Call:
        stacked = map(torch.stack, zip(*sequences(*inputs), strict=True))
        q, k, v = (x.transpose(1, 2) for x in stacked)
        mask = None
        if causal:
            length = q.shape[2]
            mask = create_block_mask(
                lambda _b, _h, i, j: i >= j, None, None, length, length, device=q.device
            )
        compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)
        return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=True).transpose(1, 2)

    return Peer(prepare)


def four_kernels(
    norm: Callable[..., object] | None = None,
    rotary: Callable[..., Call] | None = None,
    page_write: Callable[..., Call] | None = None,
) -> Peer:
    """`fused_qk_norm_rope_cache` by two norms, one RoPE and one page write; ours by default.

    norm: called with (out, x, weight, eps). The others are prepared like peers of their ops.
    """
    norm, rotary, page_write = norm or _norm, rotary or _rotary, page_write or _page_write

    def prepare(*inputs: Any) -> Call:
        qkv, positions, table, q_weight, k_weight, eps, k_cache, v_cache, slots = inputs
        query, key, value = split_heads(qkv, k_cache)
        normed_query, normed_key = (torch.empty_like(x) for x in (query, key))
        rotate = rotary(positions, normed_query, normed_key, table)
        write = page_write(normed_key, value, k_cache, v_cache, slots)

        def call() -> Outputs:
            norm(normed_query, query, q_weight, eps)
            norm(normed_key, key, k_weight, eps)
            rotate()
            return normed_query, *write()

        return call

    return Peer(prepare)


def _norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> object:
    return echokernels.rms_norm(x, weight, eps, out=out)


def _rotary(positions: Tensor, query: Tensor, key: Tensor, table: Tensor) -> Call:
    arguments = positions, query, key, query.shape[-1], table
    return mutating(echokernels.rotary_embedding, *arguments, outputs=(query, key))


def _page_write(*inputs: Tensor) -> Call:
    return mutating(echokernels.reshape_and_cache, *inputs, outputs=inputs[2:4])
