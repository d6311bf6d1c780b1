"""Merging two attention states over disjoint keys into the state over their union (cascade, shared
prefixes).

    w_i = exp(lse_i - max(lse_1, lse_2))
    out = (w_1 out_1 + w_2 out_2) / (w_1 + w_2),   lse = max(lse_1, lse_2) + log(w_1 + w_2)

in fp32, natural logarithm (the "attention state" algebra of FlashInfer, Ye et al., 2025). A state
over no keys is out anything, lse -inf, and adds nothing; two of them give 0 and -inf.

Mutates `out` and `out_lse`; they may be the prefix's or the suffix's own tensors.
"""

import torch
import triton
import triton.language as tl

from echokernels._checks import (
    FLOATS,
    check_dim,
    check_dtype,
    check_last_contiguous,
    check_same_device,
    check_shape,
)
from echokernels._launch import launch
from echokernels._library import define_op
from echokernels._tuning import TileConfig, select
from echokernels.attention import reference


@triton.jit
def _weights(lse_1, lse_2):
    """(weight of each state, sum of both, the larger LSE)"""
    top = tl.maximum(lse_1, lse_2)
    # Both are empty where top is -inf; 0 in its place makes both weights 0, not NaN.
    safe = tl.where(top == float("-inf"), 0.0, top)
    w_1, w_2 = tl.exp(lse_1 - safe), tl.exp(lse_2 - safe)
    return w_1, w_2, w_1 + w_2, top


@triton.jit(do_not_specialize=["num_rows"])
def _merge_attn_states_kernel(
    out_ptr,  # [tokens, heads, head_dim]
    out_lse_ptr,  # f32[heads, tokens], or None
    out_1_ptr,  # [tokens, heads, head_dim]
    lse_1_ptr,  # f32[heads, tokens]
    out_2_ptr,
    lse_2_ptr,
    num_rows,  # tokens * heads
    heads,
    head_dim,
    out_stride_token,
    out_stride_head,
    out_lse_stride_head,
    out_lse_stride_token,
    out_1_stride_token,
    out_1_stride_head,
    lse_1_stride_head,
    lse_1_stride_token,
    out_2_stride_token,
    out_2_stride_head,
    lse_2_stride_head,
    lse_2_stride_token,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    token = row // heads
    head = row % heads
    row_mask = row < num_rows
    lse_1 = tl.load(
        lse_1_ptr + head * lse_1_stride_head + token * lse_1_stride_token,
        mask=row_mask,
        other=float("-inf"),
    )
    lse_2 = tl.load(
        lse_2_ptr + head * lse_2_stride_head + token * lse_2_stride_token,
        mask=row_mask,
        other=float("-inf"),
    )
    w_1, w_2, total, top = _weights(lse_1, lse_2)

    d = tl.arange(0, BLOCK_D)[None, :]
    mask = row_mask[:, None] & (d < head_dim)
    # A state of weight 0 is not read: it may be anything, NaN included.
    out_1 = tl.load(
        out_1_ptr + (token * out_1_stride_token + head * out_1_stride_head)[:, None] + d,
        mask=mask & (w_1 > 0.0)[:, None],
        other=0.0,
    ).to(tl.float32)
    out_2 = tl.load(
        out_2_ptr + (token * out_2_stride_token + head * out_2_stride_head)[:, None] + d,
        mask=mask & (w_2 > 0.0)[:, None],
        other=0.0,
    ).to(tl.float32)
    safe = tl.where(total == 0.0, 1.0, total)
    out = out_1 * (w_1 / safe)[:, None] + out_2 * (w_2 / safe)[:, None]
    out_rows = out_ptr + (token * out_stride_token + head * out_stride_head)[:, None]
    tl.store(out_rows + d, out.to(out_ptr.dtype.element_ty), mask=mask)
    if out_lse_ptr is not None:
        lse = tl.where(total == 0.0, float("-inf"), top + tl.log(safe))
        tl.store(
            out_lse_ptr + head * out_lse_stride_head + token * out_lse_stride_token,
            lse,
            mask=row_mask,
        )


def _config(head_dim: int) -> TileConfig:
    block_d = triton.next_power_of_2(head_dim)
    # 2,048 elements over 4 warps: two 16-byte loads of bf16 from each state in flight for every
    # thread.
    return TileConfig(max(1, 2048 // block_d), block_d, num_warps=4)


def _check(
    out: torch.Tensor,
    out_lse: torch.Tensor | None,
    prefix_out: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_out: torch.Tensor,
    suffix_lse: torch.Tensor,
) -> None:
    check_dim("prefix_out", prefix_out, 3)
    check_dtype("prefix_out", prefix_out, FLOATS)
    tokens, heads, head_dim = prefix_out.shape
    if head_dim == 0:
        raise ValueError(
            f"prefix_out.shape is {tuple(prefix_out.shape)}, must have a head_dim of at least 1"
        )
    for name, state in (("out", out), ("prefix_out", prefix_out), ("suffix_out", suffix_out)):
        check_shape(name, state, tokens, heads, head_dim)
        check_dtype(name, state, (prefix_out.dtype,))
        check_last_contiguous(name, state)
    lses = {"prefix_lse": prefix_lse, "suffix_lse": suffix_lse}
    if out_lse is not None:
        lses["out_lse"] = out_lse
    for name, lse in lses.items():
        check_shape(name, lse, heads, tokens)
        check_dtype(name, lse, (torch.float32,))
    check_same_device("prefix_out", prefix_out, out=out, suffix_out=suffix_out, **lses)


def _launch(
    out: torch.Tensor,
    out_lse: torch.Tensor | None,
    prefix_out: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_out: torch.Tensor,
    suffix_lse: torch.Tensor,
) -> None:
    tokens, heads, head_dim = out.shape
    config = select("merge_attn_states", head_dim, lambda: _config(head_dim))
    launch(
        _merge_attn_states_kernel,
        (triton.cdiv(tokens * heads, config.block_m),),
        out,
        out_lse,
        prefix_out,
        prefix_lse,
        suffix_out,
        suffix_lse,
        tokens * heads,
        heads,
        head_dim,
        *out.stride()[:2],
        *((0, 0) if out_lse is None else out_lse.stride()),
        *prefix_out.stride()[:2],
        *prefix_lse.stride(),
        *suffix_out.stride()[:2],
        *suffix_lse.stride(),
        BLOCK_M=config.block_m,
        BLOCK_D=config.block_n,
        num_warps=config.num_warps,
    )


_merge_attn_states = define_op(
    "merge_attn_states(Tensor(a!) out, Tensor(b!)? out_lse, Tensor prefix_out, Tensor prefix_lse, "
    "Tensor suffix_out, Tensor suffix_lse) -> ()",
    check=_check,
    triton=_launch,
    reference=reference.merge_attn_states,
)


def merge_attn_states(
    prefix_out: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_out: torch.Tensor,
    suffix_lse: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention state (out, lse) over the keys of both states.

    prefix_out, suffix_out: [tokens, heads, head_dim] of one dtype, last dimension contiguous.
    prefix_lse, suffix_lse: f32[heads, tokens], natural logarithm, as the attention ops return them.
    `out` and `out_lse` are allocated unless given.
    Raises ValueError or TypeError for arguments that do not fit.
    """
    if out is None:
        out = torch.empty_like(prefix_out, memory_format=torch.contiguous_format)
    if out_lse is None:
        out_lse = torch.empty_like(
            prefix_lse, dtype=torch.float32, memory_format=torch.contiguous_format
        )
    _merge_attn_states(out, out_lse, prefix_out, prefix_lse, suffix_out, suffix_lse)
    return out, out_lse
