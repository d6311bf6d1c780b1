"""RMSNorm and Add-RMSNorm with quantised output, one dynamic scale for each row.

    s     = x + residual                                         (s = x without a residual)
    y     = s / sqrt(mean(s^2) + eps) * (weight + weight_offset)
    scale = max(max|y| / limit, 1e-12)                           limit = 127 (int8), 448 (fp8)
    out   = y / scale                                            rounded half to even

y is fp32 and never rounded on the way to its code; s is rounded only for the returned residual.

`out`, `scale` and `residual`, which becomes s, are mutated; `x` is not.
"""

import torch
import triton
import triton.language as tl

from echokernels._checks import check_same_device
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
from echokernels.norm.rms_norm import check_input, check_rows
from echokernels.quant._row import (
    LIMITS,
    check_codes,
    check_has_casts,
    encode,
    largest,
    magnitude,
    row_scale,
)


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_quant_kernel(
    out_ptr,  # [num_rows / heads, heads, width]
    scale_ptr,  # fp32 [num_rows / heads, heads]
    x_ptr,  # [num_rows / heads, heads, width]
    residual_ptr,  # [num_rows / heads, heads, width], in and out; unused without HAS_RESIDUAL
    weight_ptr,  # [width]
    num_rows,
    heads,
    width,
    out_stride_token,
    out_stride_head,
    scale_stride_token,
    scale_stride_head,
    x_stride_token,
    x_stride_head,
    residual_stride_token,
    residual_stride_head,
    eps,
    weight_offset,
    LIMIT: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    TILES: tl.constexpr,  # of a row
    EVICTION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = (row < num_rows)[:, None]
    x_rows = row_pointers(x_ptr, row, heads, x_stride_token, x_stride_head)
    out_rows = row_pointers(out_ptr, row, heads, out_stride_token, out_stride_head)
    scale_rows = row_pointers(scale_ptr, row, heads, scale_stride_token, scale_stride_head)
    residual_rows = row_pointers(
        residual_ptr, row, heads, residual_stride_token, residual_stride_head
    )

    KEEP: tl.constexpr = TILES == 1
    wait_for_previous(PDL)
    # The norm divides a row by one number, so |y| is largest where |s * weight| is: one pass finds
    # both.
    squares = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    bits = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for tile in tl.static_range(TILES):
        column = (tile * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
        mask = row_mask & (column < width)
        s = load_sum(x_rows + column, residual_rows + column, mask, HAS_RESIDUAL, EVICTION)
        weighted = s * load_weight(weight_ptr + column, weight_offset, column < width)
        squares += s * s
        bits = tl.maximum(bits, magnitude(weighted))
    let_next_start(PDL)
    inverse_rms = tl.rsqrt(tl.sum(squares, axis=1) / width + eps)[:, None]
    scale = row_scale(largest(bits)[:, None] * inverse_rms, LIMIT)
    tl.store(scale_rows, scale, mask=row_mask)

    for tile in tl.static_range(TILES):
        column = (tile * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
        mask = row_mask & (column < width)
        if not KEEP:
            # The residual has not been overwritten at these columns yet.
            s = reload_sum(x_rows + column, residual_rows + column, mask, HAS_RESIDUAL, EVICTION)
            weighted = s * load_weight(weight_ptr + column, weight_offset, column < width)
        if HAS_RESIDUAL:
            tl.store(residual_rows + column, s.to(residual_ptr.dtype.element_ty), mask=mask)
        code = encode(weighted * inverse_rms, scale, out_ptr.dtype.element_ty)
        tl.store(out_rows + column, code, mask=mask)


# Half of the warps of rms_norm: what a thread does once for a row weighs more here.
WARP_ELEMENTS = 1024


def _check(
    out: torch.Tensor,
    scale: torch.Tensor,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float = 0.0,  # noqa: ARG001
) -> None:
    check_input(x, weight, eps)
    check_codes(out, scale, *x.shape)
    if residual is not None:
        check_rows("residual", residual, x)
    check_same_device("x", x, out=out, scale=scale, residual=residual, weight=weight)


def _launch(
    out: torch.Tensor,
    scale: torch.Tensor,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float = 0.0,
) -> None:
    check_has_casts("out", out)
    width = x.shape[-1]
    num_rows = x.numel() // width
    config = select("rms_norm_quant", width, lambda: tile_of(width, WARP_ELEMENTS))
    heads, *x_strides = rows_of(x)
    launch(
        _rms_norm_quant_kernel,
        (triton.cdiv(num_rows, config.block_m),),
        out,
        scale,
        x,
        x if residual is None else residual,
        weight,
        num_rows,
        heads,
        width,
        *rows_of(out)[1:],
        scale.stride(0),
        0 if x.dim() == 2 else scale.stride(1),
        *x_strides,
        *rows_of(x if residual is None else residual)[1:],
        eps,
        weight_offset,
        LIMIT=LIMITS[out.dtype],
        HAS_RESIDUAL=residual is not None,
        TILES=triton.cdiv(width, config.block_n),
        EVICTION=eviction_of(x),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        num_warps=config.num_warps,
        **early_launch(x.device),
    )


_rms_norm_quant = define_op(
    "rms_norm_quant(Tensor(a!) out, Tensor(b!) scale, Tensor x, Tensor(c!)? residual, "
    "Tensor weight, float eps, float weight_offset=0.0) -> ()",
    check=_check,
    triton=_launch,
    reference=reference.rms_norm_quant,
)


def rms_norm_quant(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    residual: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    dtype: torch.dtype = torch.int8,
    out: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm over the last dimension, quantised row by row: codes and scales.

    x: [tokens, width] or [tokens, heads, width], fp16, bf16 or fp32, last dimension contiguous, any
    other strides. residual: the same shape and dtype; it becomes x + residual, and that is what is
    normalised. weight: [width].
    Returns (out, scale), allocated unless given: codes of x's shape in `dtype`, int8 or
    float8_e4m3fn, last dimension contiguous, and fp32 of x's shape without the last dimension, any
    strides. `dtype` counts only where `out` is not given. A row that holds NaN or infinity has
    scale NaN and codes 0.
    Raises ValueError or TypeError for shapes, strides, devices or dtypes that do not fit, and for
    float8_e4m3fn on a GPU without it.
    """
    if out is None:
        out = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    if scale is None:
        scale = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    _rms_norm_quant(out, scale, x, residual, weight, eps, weight_offset)
    return out, scale
