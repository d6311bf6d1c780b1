"""INT8 codes of rows of any shape, as quantised KV caches hold them, and back.

    scale = max(max|x| / 127, 1e-12)             one for each row, fp32
    q     = x / scale                            rounded half to even, in [-127, 127]
    out   = q * scale                            rounded to out's dtype

x, q, out: [..., n], scale: [...]. A row that holds NaN or infinity has scale NaN and codes 0, and
comes back as NaN (see _row.py). `q` and `scale`, or `out`, are mutated.
"""

from collections.abc import Callable
from itertools import chain

import torch
import triton
import triton.language as tl

from echokernels._checks import (
    FLOATS,
    check_dtype,
    check_last_contiguous,
    check_same_device,
    check_shape,
)
from echokernels._l2 import eviction_of
from echokernels._launch import launch
from echokernels._library import define_op
from echokernels._pdl import early_launch, let_next_start, wait_for_previous
from echokernels._tuning import TileConfig, select
from echokernels.quant import reference
from echokernels.quant._row import encode, largest, magnitude, row_scale_of

MAX_DIMS = 3
"""Dimensions of rows that a kernel walks."""


@triton.jit
def _row_pointers(ptr, row, size_1, size_2, stride_0, stride_1, stride_2):
    """Pointers [rows, 1] to rows `row` (int64), counted through dimensions of sizes
    [any, size_1, size_2]."""
    outer, inner = row // size_2, row % size_2
    offset = outer // size_1 * stride_0 + outer % size_1 * stride_1 + inner * stride_2
    return (ptr + offset)[:, None]


@triton.jit(do_not_specialize=["num_rows"])
def _quantize_kernel(
    q_ptr,  # int8 [num_rows, width]
    scale_ptr,  # f32 [num_rows]
    x_ptr,  # [num_rows, width]
    num_rows,
    size_1,
    size_2,
    width,
    q_stride_0,
    q_stride_1,
    q_stride_2,
    scale_stride_0,
    scale_stride_1,
    scale_stride_2,
    x_stride_0,
    x_stride_1,
    x_stride_2,
    TILES: tl.constexpr,  # of a row
    EVICTION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    CODE: tl.constexpr = q_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = (row < num_rows)[:, None]
    q_rows = _row_pointers(q_ptr, row, size_1, size_2, q_stride_0, q_stride_1, q_stride_2)
    x_rows = _row_pointers(x_ptr, row, size_1, size_2, x_stride_0, x_stride_1, x_stride_2)
    scale_rows = _row_pointers(
        scale_ptr, row, size_1, size_2, scale_stride_0, scale_stride_1, scale_stride_2
    )

    KEEP: tl.constexpr = TILES == 1
    wait_for_previous(PDL)
    bits = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for tile in tl.static_range(TILES):
        column = (tile * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
        x = _load(x_rows + column, row_mask & (column < width), EVICTION)
        bits = tl.maximum(bits, magnitude(x))
    let_next_start(PDL)
    scale = row_scale_of(largest(bits)[:, None], CODE)
    tl.store(scale_rows, scale, mask=row_mask)

    for tile in tl.static_range(TILES):
        column = (tile * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
        mask = row_mask & (column < width)
        if not KEEP:
            x = _load(x_rows + column, mask, EVICTION)
        tl.store(q_rows + column, encode(x, scale, CODE), mask=mask)


@triton.jit
def _load(ptrs, mask, EVICTION: tl.constexpr):
    return tl.load(ptrs, mask=mask, other=0.0, eviction_policy=EVICTION).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def _dequantize_kernel(
    out_ptr,  # [num_rows, width]
    q_ptr,  # int8 [num_rows, width]
    scale_ptr,  # f32 [num_rows]
    num_rows,
    size_1,
    size_2,
    width,
    out_stride_0,
    out_stride_1,
    out_stride_2,
    q_stride_0,
    q_stride_1,
    q_stride_2,
    scale_stride_0,
    scale_stride_1,
    scale_stride_2,
    TILES: tl.constexpr,  # of a row
    EVICTION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = (row < num_rows)[:, None]
    out_rows = _row_pointers(out_ptr, row, size_1, size_2, out_stride_0, out_stride_1, out_stride_2)
    q_rows = _row_pointers(q_ptr, row, size_1, size_2, q_stride_0, q_stride_1, q_stride_2)
    scale_rows = _row_pointers(
        scale_ptr, row, size_1, size_2, scale_stride_0, scale_stride_1, scale_stride_2
    )

    wait_for_previous(PDL)
    scale = tl.load(scale_rows, mask=row_mask, other=0.0)
    for tile in tl.static_range(TILES):
        column = (tile * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
        mask = row_mask & (column < width)
        q = tl.load(q_rows + column, mask=mask, other=0, eviction_policy=EVICTION)
        if tile == TILES - 1:
            let_next_start(PDL)
        out = q.to(tl.float32) * scale
        tl.store(out_rows + column, out.to(out_ptr.dtype.element_ty), mask=mask)


def fold(tensors: tuple[torch.Tensor, ...], num_dims: int) -> list[tuple[int, tuple[int, ...]]]:
    """The first `num_dims` dimensions, as few as describe where each of the tensors has its rows:
    the size of each, and the stride of each tensor."""
    dims: list[tuple[int, tuple[int, ...]]] = []
    for dim in range(num_dims):
        size, strides = tensors[0].shape[dim], tuple(t.stride(dim) for t in tensors)
        if size == 1:
            continue
        if dims and dims[-1][1] == tuple(size * stride for stride in strides):
            dims[-1] = (dims[-1][0] * size, strides)
        else:
            dims.append((size, strides))
    return dims


def _config(width: int) -> TileConfig:
    # Rows of a head are narrow and share a program; 16 values a thread are 32 bytes of bf16.
    block_n = min(max(triton.next_power_of_2(width), 1), 16_384)
    block_m = max(1, 2048 // block_n)
    return TileConfig(block_m, block_n, min(max(block_m * block_n // 512, 1), 16))


def _launch(
    op: str, kernel: Callable[..., None], source: torch.Tensor, *tensors: torch.Tensor
) -> None:
    """Runs `kernel` on `tensors`, its own; `source` is the one of them that is read by rows."""
    dims = fold(tensors, source.dim() - 1)
    if len(dims) > MAX_DIMS:
        for part, *parts in zip(source, *tensors, strict=True):
            _launch(op, kernel, part, *parts)
        return
    dims = [(1, (0,) * len(tensors))] * (MAX_DIMS - len(dims)) + dims
    (_, size_1, size_2), strides = zip(*dims, strict=True)
    num_rows, width = source.shape[:-1].numel(), source.shape[-1]
    config = select(op, width, lambda: _config(width))
    launch(
        kernel,
        (triton.cdiv(num_rows, config.block_m),),
        *tensors,
        num_rows,
        size_1,
        size_2,
        width,
        *chain(*zip(*strides, strict=True)),
        TILES=max(triton.cdiv(width, config.block_n), 1),
        EVICTION=eviction_of(source),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        num_warps=config.num_warps,
        **early_launch(source.device),
    )


def _check_rows(
    name: str, tensor: torch.Tensor, allowed: tuple[torch.dtype, ...], shape: torch.Size
) -> None:
    if len(shape) == 0:
        raise ValueError(f"{name}.shape is (), must have at least 1 dimension")
    check_shape(name, tensor, *shape)
    check_dtype(name, tensor, allowed)
    check_last_contiguous(name, tensor)


def _check_scale(scale: torch.Tensor, shape: torch.Size) -> None:
    check_shape("scale", scale, *shape[:-1])
    check_dtype("scale", scale, (torch.float32,))


def _check_quantize(q: torch.Tensor, scale: torch.Tensor, x: torch.Tensor) -> None:
    _check_rows("x", x, FLOATS, x.shape)
    _check_rows("q", q, (torch.int8,), x.shape)
    _check_scale(scale, x.shape)
    check_same_device("x", x, q=q, scale=scale)


def _check_dequantize(out: torch.Tensor, q: torch.Tensor, scale: torch.Tensor) -> None:
    _check_rows("q", q, (torch.int8,), q.shape)
    _check_rows("out", out, FLOATS, q.shape)
    _check_scale(scale, q.shape)
    check_same_device("q", q, out=out, scale=scale)


def _launch_quantize(q: torch.Tensor, scale: torch.Tensor, x: torch.Tensor) -> None:
    _launch("quantize_int8", _quantize_kernel, x, q, scale, x)


def _launch_dequantize(out: torch.Tensor, q: torch.Tensor, scale: torch.Tensor) -> None:
    _launch("dequantize_int8", _dequantize_kernel, q, out, q, scale)


_quantize_int8 = define_op(
    "quantize_int8(Tensor(a!) q, Tensor(b!) scale, Tensor x) -> ()",
    check=_check_quantize,
    triton=_launch_quantize,
    reference=reference.quantize_int8,
)

_dequantize_int8 = define_op(
    "dequantize_int8(Tensor(a!) out, Tensor q, Tensor scale) -> ()",
    check=_check_dequantize,
    triton=_launch_dequantize,
    reference=reference.dequantize_int8,
)


def quantize_int8(
    x: torch.Tensor, out: torch.Tensor | None = None, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises each row, the last dimension, by itself: codes and scales, as INT8 KV caches hold
    them.

    x: [..., n], fp16, bf16 or fp32, last dimension contiguous, any other strides.
    Returns (out, scale), allocated unless given: int8 codes of x's shape, from -127 to 127, last
    dimension contiguous, and fp32 of x's shape without the last dimension, any strides, so that x
    is about out * scale. A row that holds NaN or infinity has scale NaN and codes 0.
    Raises ValueError or TypeError for shapes, strides, devices or dtypes that do not fit.
    """
    if out is None:
        out = torch.empty_like(x, dtype=torch.int8, memory_format=torch.contiguous_format)
    if scale is None:
        scale = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    _quantize_int8(out, scale, x)
    return out, scale


def dequantize_int8(
    q: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """q * scale, row by row: what `quantize_int8` has quantised, to within scale / 2.

    q: int8 [..., n], last dimension contiguous; scale: fp32 [...]; any other strides.
    Returns `out`, of q's shape, last dimension contiguous, allocated unless given: fp16, bf16 or
    fp32. `dtype` counts only where `out` is not given.
    Raises ValueError or TypeError for shapes, strides, devices or dtypes that do not fit.
    """
    if out is None:
        out = torch.empty_like(q, dtype=dtype, memory_format=torch.contiguous_format)
    _dequantize_int8(out, q, scale)
    return out
