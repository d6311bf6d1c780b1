"""What the kernels of the norms share: rows, and the sum that is normalised."""

import torch
import triton
import triton.language as tl

from echokernels._tuning import TileConfig


@triton.jit
def row_pointers(ptr, row, heads, stride_token, stride_head):
    """Pointers [rows, 1] to the first elements of rows `row` (int64) of a tensor
    [tokens, heads, width]."""
    return ptr + ((row // heads) * stride_token + (row % heads) * stride_head)[:, None]


@triton.jit
def load_sum(x_ptrs, residual_ptrs, mask, HAS_RESIDUAL: tl.constexpr, EVICTION: tl.constexpr):
    """x + residual, or x alone, in fp32."""
    s = tl.load(x_ptrs, mask=mask, other=0.0, eviction_policy=EVICTION).to(tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptrs, mask=mask, other=0.0, eviction_policy=EVICTION)
        s += residual.to(tl.float32)
    return s


@triton.jit
def reload_sum(x_ptrs, residual_ptrs, mask, HAS_RESIDUAL: tl.constexpr, EVICTION: tl.constexpr):
    """What `load_sum` has loaded with the same arguments, for the last time."""
    LAST: tl.constexpr = "evict_first" if EVICTION != "" else ""
    return load_sum(x_ptrs, residual_ptrs, mask, HAS_RESIDUAL, LAST)


@triton.jit
def load_weight(weight_ptrs, weight_offset, mask):
    return tl.load(weight_ptrs, mask=mask, other=0.0).to(tl.float32) + weight_offset


def rows_of(x: torch.Tensor) -> tuple[int, int, int]:
    """(heads, stride of a token, stride of a head) of [tokens, width], which has one head, or
    [tokens, heads, width]."""
    return (1, x.stride(0), 0) if x.dim() == 2 else (x.shape[1], x.stride(0), x.stride(1))


def tile_of(width: int, warp_elements: int) -> TileConfig:
    """Rows of a program, columns of a tile, and warps for about `warp_elements` of them each.

    By the width alone: other warps add in another order, and a row must not depend on its batch.
    """
    # Wider rows are read twice, tile by tile.
    block_n = min(triton.next_power_of_2(width), 16_384)
    # Narrow rows share a program: below 2,048 elements an SM cannot start programs fast enough.
    block_m = max(1, 2048 // block_n)
    # A power of 2, rounded down; with 32 warps only two rows would fit an SM.
    num_warps = 1 << (block_m * min(width, block_n) // warp_elements).bit_length() >> 1
    return TileConfig(block_m, block_n, min(max(num_warps, 1), 16))
