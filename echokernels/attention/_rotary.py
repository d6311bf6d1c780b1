"""Heads of one token in registers, normed and rotated: what the rotary kernels share.

A tile is `block_h` heads: as many as give every thread 16 bytes to load. A program takes several
tiles, a tuple. The token's row of the table, and weights, are loaded in the shape of a tile too:
each thread has what its own heads need, in all tiles, and none asks another through shared memory.

In registers a head is (x, y, rest). Pair i of x and y is columns (i, i + half) of the head if
`is_neox`, else (2i, 2i + 1), for i < half. `rest` is the columns from 2 * half to head_dim, which
do not turn; if `block_rest` is 0 they are left alone, and `rest` means nothing.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from echokernels._tuning import TileConfig
from echokernels.quant._row import encode, largest, magnitude, row_scale_of


class Heads(NamedTuple):
    """What kernels know about the heads of one kind, as one constexpr."""

    number: int  # of a token
    head_dim: int
    half: int
    is_neox: bool
    tiles: int  # of one program
    block_h: int
    block_half: int
    block_rest: int


def heads_of(
    config: TileConfig,
    programs: int,
    number: int,
    head_dim: int,
    half: int,
    is_neox: bool,
    has_rest: bool = False,
) -> Heads:
    """Heads that `programs` share. `has_rest`: the columns that do not turn matter."""
    block_half = triton.next_power_of_2(half)
    # 8 pairs a thread: 16 bytes of x and 16 of y if they are bf16.
    block_h = min(max(1, 256 * config.num_warps // block_half), config.block_m)
    rest = head_dim - 2 * half if has_rest else 0
    return Heads(
        number,
        head_dim,
        half,
        is_neox,
        tiles=triton.cdiv(number, programs * block_h),
        block_h=block_h,
        block_half=block_half,
        block_rest=triton.next_power_of_2(rest) if rest else 0,
    )


@triton.jit
def load_heads(
    token_ptr,  # [number, head_dim]
    stride_head,
    part,  # which of the programs that share them this is
    number,
    HEADS: tl.constexpr,
    EVICTION: tl.constexpr,
):
    """The program's heads, as they are stored: a tuple of tiles."""
    TILES: tl.constexpr = HEADS.tiles
    tiles = ()
    for i in tl.static_range(TILES):
        head = _numbers(part * TILES + i, HEADS)
        tile = _load_tile(token_ptr + head * stride_head, head < number, HEADS, EVICTION)
        tiles += (tile,)  # type: ignore[assignment]
    return tiles


@triton.jit
def store_heads(
    token_ptr,  # [number, head_dim]
    stride_head,
    part,
    number,
    tiles,
    HEADS: tl.constexpr,
):
    """Stores tiles where `load_heads` would load them."""
    TILES: tl.constexpr = HEADS.tiles
    for i in tl.static_range(TILES):
        head = _numbers(part * TILES + i, HEADS)
        _store_tile(token_ptr + head * stride_head, head < number, tiles[i], HEADS)


@triton.jit
def store_codes(
    token_ptr,  # codes [number, head_dim]
    stride_head,
    scale_ptr,  # f32[number]
    scale_stride_head,
    part,
    number,
    tiles,
    HEADS: tl.constexpr,
):
    """Stores tiles quantised: codes where `store_heads` would store heads, and their scales."""
    TILES: tl.constexpr = HEADS.tiles
    for i in tl.static_range(TILES):
        head = _numbers(part * TILES + i, HEADS)
        codes, scale = _quantise(tiles[i], token_ptr.dtype.element_ty, HEADS)
        _store_tile(token_ptr + head * stride_head, head < number, codes, HEADS)
        tl.store(scale_ptr + head * scale_stride_head, scale, mask=head < number)


@triton.jit
def load_weight(
    weight_ptr,  # [head_dim]
    HEADS: tl.constexpr,
):
    """A tile with the weight at every head."""
    row = tl.arange(0, HEADS.block_h)[:, None]
    return _load_tile(weight_ptr + 0 * row, row >= 0, HEADS, "")


@triton.jit
def load_angles(
    row_ptr,  # f32[2 * half], the position's row of the table
    HEADS: tl.constexpr,
):
    """(cos, sin), each f32[block_h, block_half], the same at every head."""
    pair = tl.arange(0, HEADS.block_half)[None, :] + 0 * tl.arange(0, HEADS.block_h)[:, None]
    cos = tl.load(row_ptr + pair, mask=pair < HEADS.half, other=0.0)
    sin = tl.load(row_ptr + HEADS.half + pair, mask=pair < HEADS.half, other=0.0)
    return cos, sin


@triton.jit
def normalise_heads(tiles, weight, eps, HEADS: tl.constexpr):
    """RMSNorm of each head, left in fp32."""
    return [_normalise(tile, weight, eps, HEADS) for tile in tiles]


@triton.jit
def rotate_heads(tiles, cos, sin, dtype: tl.constexpr):
    """Every pair turned, in fp32, and rounded to `dtype`."""
    return [_rotate(tile, cos, sin, dtype) for tile in tiles]


@triton.jit
def rotate(x, y, cos, sin):
    """(x cos - y sin, y cos + x sin) in fp32, with the same bits wherever it is inlined."""
    x, y = x.to(tl.float32), y.to(tl.float32)
    return tl.fma(x, cos, -(y * sin)), tl.fma(y, cos, x * sin)


@triton.jit
def _rotate(tile, cos, sin, dtype: tl.constexpr):
    x, y, rest = tile
    x, y = rotate(x, y, cos, sin)
    return x.to(dtype), y.to(dtype), rest.to(dtype)


@triton.jit
def _normalise(tile, weight, eps, HEADS: tl.constexpr):
    x, y, rest = tile
    weight_x, weight_y, weight_rest = weight
    x, y = x.to(tl.float32), y.to(tl.float32)
    square_sum = tl.sum(x * x + y * y, axis=1)
    if HEADS.block_rest > 0:
        rest = rest.to(tl.float32)
        square_sum += tl.sum(rest * rest, axis=1)
    inverse_rms = tl.rsqrt(square_sum / HEADS.head_dim + eps)[:, None]
    x = x * inverse_rms * weight_x.to(tl.float32)
    y = y * inverse_rms * weight_y.to(tl.float32)
    if HEADS.block_rest > 0:
        rest = rest * inverse_rms * weight_rest.to(tl.float32)
    return x, y, rest


@triton.jit
def _quantise(tile, CODE: tl.constexpr, HEADS: tl.constexpr):
    """(the tile as codes, the heads' scales [block_h, 1])."""
    x, y, rest = tile
    x, y, rest = x.to(tl.float32), y.to(tl.float32), rest.to(tl.float32)
    absmax = largest(tl.maximum(magnitude(x), magnitude(y)))
    if HEADS.block_rest > 0:
        absmax = tl.maximum(absmax, largest(magnitude(rest)), propagate_nan=tl.PropagateNan.ALL)
    scale = row_scale_of(absmax[:, None], CODE)
    return (encode(x, scale, CODE), encode(y, scale, CODE), encode(rest, scale, CODE)), scale


@triton.jit
def _numbers(tile, HEADS: tl.constexpr):
    """Which heads a tile holds, int64[block_h, 1]."""
    return (tile * HEADS.block_h + tl.arange(0, HEADS.block_h)).to(tl.int64)[:, None]


@triton.jit
def _load_tile(
    heads_ptr,  # [block_h, 1]
    head_mask,
    HEADS: tl.constexpr,
    EVICTION: tl.constexpr,
):
    """(x, y, rest), 0 where there is no such head or column."""
    if HEADS.is_neox:
        pair = tl.arange(0, HEADS.block_half)[None, :]
        mask = head_mask & (pair < HEADS.half)
        x = tl.load(heads_ptr + pair, mask=mask, other=0.0, eviction_policy=EVICTION)
        y_ptr = heads_ptr + HEADS.half + pair
        y = tl.load(y_ptr, mask=mask, other=0.0, eviction_policy=EVICTION)
    else:
        column = tl.arange(0, 2 * HEADS.block_half)[None, :]
        mask = head_mask & (column < 2 * HEADS.half)
        xy = tl.load(heads_ptr + column, mask=mask, other=0.0, eviction_policy=EVICTION)
        x, y = tl.split(tl.reshape(xy, [HEADS.block_h, HEADS.block_half, 2]))
    rest = x
    if HEADS.block_rest > 0:
        column = 2 * HEADS.half + tl.arange(0, HEADS.block_rest)[None, :]
        mask = head_mask & (column < HEADS.head_dim)
        rest = tl.load(heads_ptr + column, mask=mask, other=0.0, eviction_policy=EVICTION)
    return x, y, rest


@triton.jit
def _store_tile(
    heads_ptr,  # [block_h, 1]
    head_mask,
    tile,
    HEADS: tl.constexpr,
):
    x, y, rest = tile
    if HEADS.is_neox:
        pair = tl.arange(0, HEADS.block_half)[None, :]
        mask = head_mask & (pair < HEADS.half)
        tl.store(heads_ptr + pair, x, mask=mask)
        tl.store(heads_ptr + HEADS.half + pair, y, mask=mask)
    else:
        column = tl.arange(0, 2 * HEADS.block_half)[None, :]
        xy = tl.reshape(tl.join(x, y), [HEADS.block_h, 2 * HEADS.block_half])
        tl.store(heads_ptr + column, xy, mask=head_mask & (column < 2 * HEADS.half))
    if HEADS.block_rest > 0:
        column = 2 * HEADS.half + tl.arange(0, HEADS.block_rest)[None, :]
        tl.store(heads_ptr + column, rest, mask=head_mask & (column < HEADS.head_dim))
