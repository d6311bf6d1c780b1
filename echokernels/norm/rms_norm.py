"""RMSNorm and Add-RMSNorm (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019).

    s = x + residual                                     (fused_add_rms_norm; else s = x)
    y = s / sqrt(mean(s^2) + eps) * (weight + weight_offset)

Everything is in fp32: the sum s enters the norm unrounded and is rounded only for the returned
residual; y is rounded once, after the weight. `weight_offset` is 1 for Gemma, whose checkpoints
store weight - 1.

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
from echokernels._launch import launch
from echokernels._library import define_op
from echokernels._tuning import TileConfig, select
from echokernels.norm import reference


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
    ONE_TILE: tl.constexpr,  # width <= BLOCK_N: the row stays in registers
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    token = row // heads
    head = row % heads
    x_rows = x_ptr + (token * x_stride_token + head * x_stride_head)[:, None]
    out_rows = out_ptr + (token * out_stride_token + head * out_stride_head)[:, None]
    residual_rows = (
        residual_ptr + (token * residual_stride_token + head * residual_stride_head)[:, None]
    )
    row_mask = (row < num_rows)[:, None]

    square_sum = tl.zeros([BLOCK_M], tl.float32)
    s = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, width, BLOCK_N):
        column = (start + tl.arange(0, BLOCK_N))[None, :]
        mask = row_mask & (column < width)
        s = tl.load(x_rows + column, mask=mask, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            s += tl.load(residual_rows + column, mask=mask, other=0.0).to(tl.float32)
        square_sum += tl.sum(s * s, axis=1)
    inverse_rms = tl.rsqrt(square_sum / width + eps)[:, None]

    for start in range(0, width, BLOCK_N):
        column = (start + tl.arange(0, BLOCK_N))[None, :]
        column_mask = column < width
        mask = row_mask & column_mask
        if not ONE_TILE:
            # Read again rather than kept: neither x nor residual has been overwritten at this
            # column yet.
            s = tl.load(x_rows + column, mask=mask, other=0.0).to(tl.float32)
            if HAS_RESIDUAL:
                s += tl.load(residual_rows + column, mask=mask, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            tl.store(residual_rows + column, s.to(residual_ptr.dtype.element_ty), mask=mask)
        weight = tl.load(weight_ptr + column, mask=column_mask, other=0.0).to(tl.float32)
        y = s * inverse_rms * (weight + weight_offset)
        tl.store(out_rows + column, y.to(out_ptr.dtype.element_ty), mask=mask)


def _config(width: int) -> TileConfig:
    # 16,384 fp32 values are 64 registers a thread over 8 warps; wider rows are read twice instead.
    block_n = min(triton.next_power_of_2(width), 16_384)
    # Narrow rows (QK-norm heads) share a program so that it has at least 1,024 elements to load.
    block_m = max(1, 1024 // block_n)
    # 1,024 elements a warp give every thread four 16-byte loads of bf16 in flight.
    num_warps = min(max(block_m * block_n // 1024, 1), 8)
    return TileConfig(block_m, block_n, num_warps)


def _check_rows(name: str, tensor: torch.Tensor, like: torch.Tensor) -> None:
    check_shape(name, tensor, *like.shape)
    check_dtype(name, tensor, (like.dtype,))
    check_last_contiguous(name, tensor)


def _check_input(x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
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
    _check_input(x, weight, eps)
    _check_rows("out", out, x)
    check_same_device("x", x, out=out, weight=weight)


def _check_fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float = 0.0,  # noqa: ARG001
) -> None:
    _check_input(x, weight, eps)
    _check_rows("residual", residual, x)
    check_same_device("x", x, residual=residual, weight=weight)


def _rows(x: torch.Tensor) -> tuple[int, int, int]:
    """(heads, stride of a token, stride of a head): a 2-D tensor has one head."""
    return (1, x.stride(0), 0) if x.dim() == 2 else (x.shape[1], x.stride(0), x.stride(1))


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
    config = select("rms_norm", width, lambda: _config(width))
    heads, *x_strides = _rows(x)
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
        *_rows(out)[1:],
        *x_strides,
        *_rows(x if residual is None else residual)[1:],
        eps,
        weight_offset,
        HAS_RESIDUAL=residual is not None,
        ONE_TILE=width <= config.block_n,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        num_warps=config.num_warps,
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
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
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
