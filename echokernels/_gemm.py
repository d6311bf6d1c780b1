"""Projections x W^T with an epilogue: what their kernels share.

For a few tokens the work is to read the weights once. So weights are the rows of the tensor cores'
tile and tokens its columns, of which 16 are the least: a tile may be narrow in weights, which makes
enough programs to keep all of memory busy, and a batch of one token wastes nothing but arithmetic.

A program owns BLOCK_M weight rows and BLOCK_T tokens and walks along K, the input's width.
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
from echokernels._target import Target
from echokernels._tuning import TileConfig

# Token tiles that share a stretch of weight rows: 1,024 tokens and their weights stay in the L2.
_GROUP = tl.constexpr(8)

_RESERVED = 1024  # bytes of shared memory that CUDA keeps of each program's


@triton.jit
def tile_of(pid, row_tiles, token_tiles):
    """(row tile, token tile) of a program: neighbours share weights, then tokens."""
    token_tile, row_tile = tl.swizzle2d(
        pid // row_tiles, pid % row_tiles, token_tiles, row_tiles, _GROUP
    )
    return row_tile, token_tile


@triton.jit
def project(
    weight_ptr,  # [rows, K]
    weight_stride,
    row,  # i64[BLOCK_M]: any rows of the weight
    row_mask,
    x_ptr,  # [tokens, K]
    x_stride,
    token,  # i64[BLOCK_T]
    token_mask,
    K,
    EVEN_K: tl.constexpr,  # BLOCK_K divides K
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,  # for the interpreter, which cannot multiply bf16
):
    """f32[BLOCK_M, BLOCK_T]: the rows' dot products with the tokens; 0 where a mask is off."""
    weight_rows = weight_ptr + (row * weight_stride)[:, None]
    x_columns = x_ptr + (token * x_stride)[None, :]
    row_mask, token_mask = row_mask[:, None], token_mask[None, :]
    acc = tl.zeros([row.shape[0], token.shape[0]], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        w_mask, x_mask = row_mask, token_mask
        if not EVEN_K:
            w_mask, x_mask = row_mask & (k < K)[None, :], token_mask & (k < K)[:, None]
        w = tl.load(weight_rows + k[None, :], mask=w_mask, other=0.0)
        x = tl.load(x_columns + k[:, None], mask=x_mask, other=0.0)
        if UPCAST:
            w, x = w.to(tl.float32), x.to(tl.float32)
        acc = tl.dot(w, x, acc, input_precision="ieee")
    return acc


@triton.jit
def split_pairs(acc):
    """Rows 2i and 2i + 1 of a tile [2n, m] as two tiles [n, m]."""
    pairs = tl.reshape(acc, [acc.shape[0] // 2, 2, acc.shape[1]])
    return tl.split(tl.permute(pairs, (0, 2, 1)))


def token_block(num_tokens: int, itemsize: int) -> int:
    """BLOCK_T: as many tokens as there are, from the least that tensor cores take."""
    # Exact fp32 products run on the ordinary cores and keep both operands in registers.
    return min(max(16, triton.next_power_of_2(num_tokens)), 32 if itemsize == 4 else 128)


def weight_rows(rows: int, block_t: int, itemsize: int, target: Target) -> int:
    """BLOCK_M for a weight of `rows`: the most that still make a program for most SMs."""
    if block_t == 128:
        return 128
    # 64 rows are what one WGMMA takes. At 64 tokens as much of x would be read as of the weights.
    most = 32 if itemsize == 4 else 64 if block_t < 64 else 128
    # Two thirds of an H200's SMs draw all that its memory gives (QKV of Llama-3-8B: 96 programs of
    # 64 rows 15.4 us, 192 of 32 rows 15.7).
    return next((n for n in (most, 64, 32) if n <= most and 3 * rows >= 2 * n * target.num_sms), 16)


def weight_tile(
    block_m: int, block_t: int, programs: int, itemsize: int, target: Target
) -> TileConfig:
    """block_m rows by block_n columns of the weight at a time, for so many programs."""
    if itemsize == 4:
        return TileConfig(block_m, 32, num_warps=4, num_stages=2)
    # All programs should run at once, for then memory is shared evenly and all end together (FFN of
    # Qwen3-8B: 384 programs, three on an SM, 47.3 us; two on an SM, in two waves, 49.9). What
    # shared memory an SM then has for each is filled with weights in flight; a fifth stage of 128
    # columns gained nothing.
    residents = triton.cdiv(programs, target.num_sms)
    budget = target.shared_memory // (residents if residents <= 4 else 2) - _RESERVED
    column_bytes = (block_m + block_t) * itemsize
    block_n, most = (128, 5) if budget >= 3 * 128 * column_bytes else (64, 8)
    num_stages = max(1, min(budget // (block_n * column_bytes), most))
    # A warpgroup for 64 rows; two where its accumulators would not leave room for addresses.
    num_warps = 2 if block_m < 64 else 4 if block_m * block_t <= 8192 else 8
    return TileConfig(block_m, block_n, num_warps, num_stages)


def check_projection(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    check_dim("x", x, 2)
    check_dtype("x", x, FLOATS)
    check_shape("weight", weight, None, x.shape[1])
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        if tensor is not None:
            check_dtype(name, tensor, (x.dtype,))
            check_last_contiguous(name, tensor)
    if bias is not None:
        check_shape("bias", bias, weight.shape[0])
    check_same_device("x", x, weight=weight, bias=bias)
