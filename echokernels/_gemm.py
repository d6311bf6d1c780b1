"""Projections x W^T with an epilogue: what their kernels share.

For a few tokens the work is to read the weights once. So weights are the rows of the tensor cores'
tile and tokens its columns, of which 16 are the least: tiles may be small, which makes enough
programs to keep all of memory busy, and a batch of one token wastes nothing but arithmetic.

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

RESERVED = 1024  # bytes of shared memory that CUDA keeps of each program's

# Bytes of weights on their way to all programs: what an H200's memory delivers in two microseconds.
# With less, few programs wait (QKV of 4,096 x 4,096, 64 tokens: 12.8 us with 5 MB, 12.2 with 8);
# with more, many slow each other (gate-up of 70B by 8 GPUs, 64 tokens: 31.1 us with 9 MB, 35.6 with
# 13).
_IN_FLIGHT = 9_200_000


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
    """BLOCK_M for a weight of `rows` and a token tile of `block_t`."""
    if itemsize == 4:
        return 32
    # At 64 tokens and more as much of x would be read as of the weights.
    if block_t == 128 or (block_t == 64 and 3 * rows >= 2 * 128 * target.num_sms):
        return 128
    # 64 rows are what one WGMMA takes. For a few tokens a quarter of an H200's SMs cannot draw all
    # that its memory gives (QKV of 70B by 8 GPUs, 1 token: 20 programs 15.3 us, 80 programs 12.9).
    return 16 if block_t == 16 and rows < 16 * target.num_sms else 64


def split_tokens(block_t: int, num_tokens: int, row_tiles: int, target: Target) -> int:
    """BLOCK_T if one tile holds all tokens, narrowed while every program still has an SM to itself:
    those of a row tile find its weights in the L2."""
    if num_tokens <= block_t:
        token_tiles = 2
        while block_t > 16 and row_tiles * token_tiles <= target.num_sms:
            block_t //= 2
            token_tiles *= 2
    return block_t


def weight_tile(
    block_m: int, block_t: int, programs: int, itemsize: int, target: Target
) -> TileConfig:
    """block_m rows by block_n columns of the weight at a time, for so many programs."""
    if itemsize == 4:
        return TileConfig(block_m, 32, num_warps=4, num_stages=2)
    # All programs should run at once, for then memory is shared evenly and all end together (FFN of
    # Qwen3-8B: 384 programs, three on an SM, 47.3 us; two on an SM, in two waves, 49.9).
    residents = triton.cdiv(programs, target.num_sms)
    budget = target.shared_memory // (residents if residents <= 4 else 2) - RESERVED
    column_bytes = (block_m + block_t) * itemsize
    if block_m < 64:
        block_n, most = 256, 4
    else:
        stage_bytes = programs * block_m * 128 * itemsize
        block_n, most = 128, min(max(5, _IN_FLIGHT // stage_bytes), 8)
    if budget < 3 * block_n * column_bytes:
        block_n, most = 64, 8
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
