"""SwiGLU with quantised output: `silu_and_mul`, then one dynamic scale for each row.

    y     = silu(gate) * up                      x = [gate | up]
    scale = max(max|y| / limit, 1e-12)           limit = 127 (int8), 448 (float8_e4m3fn)
    out   = y / scale                            rounded half to even

x: [tokens, 2 * width], out: [tokens, width], scale: fp32 [tokens]. y is fp32 and never rounded on
the way to its code. `out` and `scale` are mutated.
"""

import torch
import triton
import triton.language as tl

from echokernels._checks import check_dim, check_same_device
from echokernels._launch import launch
from echokernels._library import define_op
from echokernels._pdl import early_launch, let_next_start, wait_for_previous
from echokernels._tuning import TileConfig, select
from echokernels.activation import reference
from echokernels.activation.gated import activate, check_gate_and_up
from echokernels.quant._row import (
    LIMITS,
    check_codes,
    check_has_casts,
    encode,
    largest,
    magnitude,
    row_scale,
)


@triton.jit
def _silu_and_mul(gate_ptr, column, width):
    mask = column < width
    gate = tl.load(gate_ptr + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + width + column, mask=mask, other=0.0).to(tl.float32)
    return activate(gate, "silu") * up


@triton.jit
def _silu_and_mul_quant_kernel(
    out_ptr,  # [num_rows, width]
    scale_ptr,  # fp32 [num_rows]
    x_ptr,  # [num_rows, 2 * width]
    width,
    out_stride_row,
    scale_stride_row,
    x_stride_row,
    LIMIT: tl.constexpr,
    ONE_TILE: tl.constexpr,  # width <= BLOCK_N: the row stays in registers
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    CODE: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    gate_ptr = x_ptr + row * x_stride_row
    codes_ptr = out_ptr + row * out_stride_row
    column = tl.arange(0, BLOCK_N)

    wait_for_previous(PDL)
    if ONE_TILE:
        y = _silu_and_mul(gate_ptr, column, width)
        let_next_start(PDL)
        scale = row_scale(largest(magnitude(y)), LIMIT)
        tl.store(codes_ptr + column, encode(y, scale, CODE), mask=column < width)
    else:
        bits = tl.zeros([BLOCK_N], tl.int32)
        for start in range(0, width, BLOCK_N):
            y = _silu_and_mul(gate_ptr, start + column, width)
            bits = tl.maximum(bits, magnitude(y))
        scale = row_scale(largest(bits), LIMIT)
        # Computed again rather than kept: the row is wider than the registers.
        for start in range(0, width, BLOCK_N):
            y = _silu_and_mul(gate_ptr, start + column, width)
            code = encode(y, scale, CODE)
            tl.store(codes_ptr + start + column, code, mask=start + column < width)
    tl.store(scale_ptr + row * scale_stride_row, scale)


def _config(width: int) -> TileConfig:
    # A row in registers, 32 values a thread: two of 16,384 share an SM. Computing it twice instead
    # takes half as long again, and with 32 warps an SM has one row and idles while that is reduced.
    block_n = min(triton.next_power_of_2(width), 16_384)
    num_warps = min(max(block_n // 1024, 1), 16)
    return TileConfig(block_m=1, block_n=block_n, num_warps=num_warps)


def _check(out: torch.Tensor, scale: torch.Tensor, x: torch.Tensor) -> None:
    check_gate_and_up(x)
    check_codes(out, scale, x.shape[0], x.shape[1] // 2)
    check_same_device("x", x, out=out, scale=scale)


def _launch(out: torch.Tensor, scale: torch.Tensor, x: torch.Tensor) -> None:
    check_has_casts("out", out)
    num_rows, width = out.shape
    config = select("silu_and_mul_quant", width, lambda: _config(width))
    launch(
        _silu_and_mul_quant_kernel,
        (num_rows,),
        out,
        scale,
        x,
        width,
        out.stride(0),
        scale.stride(0),
        x.stride(0),
        LIMIT=LIMITS[out.dtype],
        ONE_TILE=width <= config.block_n,
        BLOCK_N=config.block_n,
        num_warps=config.num_warps,
        **early_launch(x.device),
    )


_silu_and_mul_quant = define_op(
    "silu_and_mul_quant(Tensor(a!) out, Tensor(b!) scale, Tensor x) -> ()",
    check=_check,
    triton=_launch,
    reference=reference.silu_and_mul_quant,
)


def silu_and_mul_quant(
    x: torch.Tensor,
    dtype: torch.dtype = torch.int8,
    out: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """SwiGLU, quantised row by row: codes and scales of silu(x[:, :d]) * x[:, d:].

    x: [tokens, 2 * d], fp16, bf16 or fp32, any row stride, last dimension contiguous.
    Returns (out, scale), allocated unless given: codes [tokens, d] of `dtype`, int8 or
    float8_e4m3fn, last dimension contiguous, and fp32 [tokens], any stride. `dtype` counts only
    where `out` is not given. A row that holds NaN or infinity has scale NaN and codes 0.
    Raises ValueError or TypeError for shapes, strides, devices or dtypes that do not fit, and for
    float8_e4m3fn on a GPU without it.
    """
    if out is None:
        check_dim("x", x, 2)
        out = torch.empty(x.shape[0], x.shape[1] // 2, dtype=dtype, device=x.device)
    if scale is None:
        scale = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    _silu_and_mul_quant(out, scale, x)
    return out, scale
