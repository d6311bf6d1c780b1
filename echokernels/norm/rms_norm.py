"""RMSNorm and Add-RMSNorm (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019).

    s = x + residual                                     (fused_add_rms_norm; else s = x)
    y = s / sqrt(mean(s^2) + eps) * (weight + weight_offset)

Everything is in fp32: the sum s enters the norm unrounded and is rounded only for the returned
residual; y is rounded once, after the weight. `weight_offset` is 1 for Gemma, whose checkpoints
store weight - 1.

Tiles follow from the width alone, so a row's result does not depend on the other rows of a call.

rms_norm mutates `out`; fused_add_rms_norm replaces `x` by y and `residual` by s.
"""

import torch
import triton
import triton.language as tl

from echokernels._checks import (
    FLOATS,
    check_dim,
    check_dtype,
    check_last_contiguous,
    check_range,
    check_same_device,
    check_shape,
)
from echokernels._l2 import eviction_of
from echokernels._launch import launch
from echokernels._library import define_op
from echokernels._pdl import early_launch, let_next_start, wait_for_previous
from echokernels._tuning import select
from echokernels.norm import reference
from echokernels.norm._row import (
    load_sum,
    load_weight,
    reload_sum,
    row_pointers,
    rows_of,
    tile_of,
)


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    out_ptr,  # [num_rows / heads, heads, width]
    x_ptr,  # [num_rows / heads, heads, width]
    residual_ptr,  # [num_rows / heads, heads, width], in and out; unused without HAS_RESIDUAL
    weight_ptr,  # [width]
    num_rows,
    heads,
    width,
    out_stride_token,
    out_stride_head,
    x_stride_token,
    x_stride_head,
    residual_stride_token,
    residual_stride_head,
    eps,
    weight_offset,
    HAS_RESIDUAL: tl.constexpr,
    TILES: tl.constexpr,  # of a row
    KEEP: tl.constexpr,  # the row in registers; else it is loaded again
    EVICTION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = (row < num_rows)[:, None]
    x_rows = row_pointers(x_ptr, row, heads, x_stride_token, x_stride_head)
    out_rows = row_pointers(out_ptr, row, heads, out_stride_token, out_stride_head)
    residual_rows = row_pointers(
        residual_ptr, row, heads, residual_stride_token, residual_stride_head
    )

    wait_for_previous(PDL)
    squares = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for tile in tl.static_range(TILES):
        column = (tile * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
        mask = row_mask & (column < width)
        s = load_sum(x_rows + column, residual_rows + column, mask, HAS_RESIDUAL, EVICTION)
        if KEEP:
            # Before the reduction, so that the weight travels together with the row.
            weight = load_weight(weight_ptr + column, weight_offset, column < width)
        squares += s * s
    let_next_start(PDL)
    inverse_rms = tl.rsqrt(tl.sum(squares, axis=1) / width + eps)[:, None]

    for tile in tl.static_range(TILES):
        column = (tile * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
        mask = row_mask & (column < width)
        if not KEEP:
            # Neither x nor residual has been overwritten at these columns yet.
            s = reload_sum(x_rows + column, residual_rows + column, mask, HAS_RESIDUAL, EVICTION)
            weight = load_weight(weight_ptr + column, weight_offset, column < width)
        if HAS_RESIDUAL:
            tl.store(residual_rows + column, s.to(residual_ptr.dtype.element_ty), mask=mask)
        y = s * inverse_rms * weight
        tl.store(out_rows + column, y.to(out_ptr.dtype.element_ty), mask=mask)


# Two 16-byte loads of bf16 for each thread.
WARP_ELEMENTS = 512


def check_rows(name: str, tensor: torch.Tensor, like: torch.Tensor) -> None:
    check_shape(name, tensor, *like.shape)
    check_dtype(name, tensor, (like.dtype,))
    check_last_contiguous(name, tensor)


def check_input(x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    check_dim("x", x, 2, 3)
    check_dtype("x", x, FLOATS)
    check_last_contiguous("x", x)
    if x.shape[-1] == 0:
        raise ValueError(f"x.shape is {tuple(x.shape)}, must have a last dimension of at least 1")
    check_shape("weight", weight, x.shape[-1])
    check_dtype("weight", weight, FLOATS)
    check_last_contiguous("weight", weight)
    check_range("eps", eps, 0.0)


def _check_rms_norm(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float = 0.0,  # noqa: ARG001
) -> None:
    check_input(x, weight, eps)
    check_rows("out", out, x)
    check_same_device("x", x, out=out, weight=weight)


def _check_fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float = 0.0,  # noqa: ARG001
) -> None:
    check_input(x, weight, eps)
    check_rows("residual", residual, x)
    check_same_device("x", x, residual=residual, weight=weight)


def _launch(
    out: torch.Tensor,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float,
) -> None:
    width = x.shape[-1]
    num_rows = x.numel() // width
    config = select("rms_norm", width, lambda: tile_of(width, WARP_ELEMENTS))
    heads, *x_strides = rows_of(x)
    tiles = triton.cdiv(width, config.block_n)
    eviction = eviction_of(x)
    # In large inputs wide rows are loaded again, from L1, rather than kept: more rows fit an SM. On
    # an H200 that is 1% faster, but not with a residual, and not for rows of 4,096.
    launch(
        _rms_norm_kernel,
        (triton.cdiv(num_rows, config.block_m),),
        out,
        x,
        x if residual is None else residual,
        weight,
        num_rows,
        heads,
        width,
        *rows_of(out)[1:],
        *x_strides,
        *rows_of(x if residual is None else residual)[1:],
        eps,
        weight_offset,
        HAS_RESIDUAL=residual is not None,
        TILES=tiles,
        KEEP=tiles == 1 and not (eviction and residual is None and width > 4096),
        EVICTION=eviction,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        num_warps=config.num_warps,
        **early_launch(x.device),
    )


def _launch_rms_norm(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float = 0.0,
) -> None:
    _launch(out, x, None, weight, eps, weight_offset)


def _launch_fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float = 0.0,
) -> None:
    _launch(x, x, residual, weight, eps, weight_offset)


_rms_norm = define_op(
    "rms_norm(Tensor(a!) out, Tensor x, Tensor weight, float eps, float weight_offset=0.0) -> ()",
    check=_check_rms_norm,
    triton=_launch_rms_norm,
    reference=reference.rms_norm,
)
_fused_add_rms_norm = define_op(
    "fused_add_rms_norm(Tensor(a!) x, Tensor(b!) residual, Tensor weight, float eps, "
    "float weight_offset=0.0) -> ()",
    check=_check_fused_add_rms_norm,
    triton=_launch_fused_add_rms_norm,
    reference=reference.fused_add_rms_norm,
)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """RMSNorm over the last dimension.

    x: [tokens, width] or [tokens, heads, width], fp16, bf16 or fp32, last dimension contiguous, any
    other strides. weight: [width]. Returns `out`, allocated contiguous unless given (it may be
    `x`).
    Raises ValueError or TypeError for shapes, strides, devices or dtypes that do not fit.
    """
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _rms_norm(out, x, weight, eps, weight_offset)
    return out


def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """In place: `residual` becomes x + residual, `x` its RMSNorm. Returns both, in that order: (x,
    residual).

    x, residual: [tokens, width] or [tokens, heads, width] of one dtype. weight: [width].
    Raises ValueError or TypeError for shapes, strides, devices or dtypes that do not fit.
    """
    _fused_add_rms_norm(x, residual, weight, eps, weight_offset)
    return x, residual
