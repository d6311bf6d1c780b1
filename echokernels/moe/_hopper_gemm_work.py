"""Tiles of the grouped product for Hopper, counted over all experts from where their rows begin.

One warp counts and tells the others. Programs take tiles in turn. Those that run at the same time
share weights, and rows of x: groups of row tiles of an expert walk along its weight tiles.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from echokernels._gluon_compat import aggregate
from echokernels.attention._hopper_memory import BLOCK_ROWS


@aggregate
class Work:
    """One tile."""

    expert: gl.tensor
    row: gl.tensor  # the first
    rows: gl.tensor  # of the expert from there on; 0: there is no more work
    column_tile: gl.tensor


@aggregate
class Experts:
    """Where the rows and tiles of each stand: [block_e]."""

    begin: gl.tensor
    end: gl.tensor
    tiles_end: gl.tensor  # tiles of all up to each
    num_tiles: gl.tensor
    column_tiles: gl.tensor


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _row_tiles(rows, S: gl.constexpr):
    return gl.cdiv(rows, S.consumers * BLOCK_ROWS)


@gluon.jit
def count_tiles(call):
    S: gl.constexpr = call.S
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    expert = gl.arange(0, S.block_e, layout=layout)
    exists = expert < call.num_experts
    begin = gl.load(call.offsets_ptr + expert, mask=exists, other=0).to(gl.int32)
    end = gl.load(call.offsets_ptr + expert + 1, mask=exists, other=0).to(gl.int32)
    COLUMNS: gl.constexpr = S.block_w // 2 if S.gated else S.block_w
    column_tiles = gl.cdiv(call.width, COLUMNS)
    tiles = _row_tiles(end - begin, S) * column_tiles
    tiles_end = gl.associative_scan(tiles, 0, _add)
    return Experts(begin, end, tiles_end, gl.sum(tiles, 0), column_tiles)


@gluon.jit
def work_of(tile, experts, call):
    S: gl.constexpr = call.S
    owner = gl.sum((experts.tiles_end <= tile).to(gl.int32), 0)
    expert = gl.arange(0, S.block_e, layout=experts.begin.type.layout)
    own = expert == owner
    begin = gl.sum(gl.where(own, experts.begin, 0), 0)
    end = gl.sum(gl.where(own, experts.end, 0), 0)
    tiles_end = gl.sum(gl.where(own, experts.tiles_end, 0), 0)
    row_tiles = _row_tiles(end - begin, S)
    place = tile - (tiles_end - row_tiles * experts.column_tiles)
    row_tile, column_tile = _place_of(place, row_tiles, experts.column_tiles, call.group)
    row = begin + row_tile * (S.consumers * BLOCK_ROWS)
    rows = gl.where(tile < experts.num_tiles, end - row, 0)
    return Work(owner, row, rows, column_tile)


@gluon.jit
def _place_of(place, row_tiles, column_tiles, group):
    """(row tile, column tile) of an expert's tile."""
    group = gl.maximum(gl.minimum(group, row_tiles), 1)
    first = place // (group * column_tiles) * group
    size = gl.maximum(gl.minimum(row_tiles - first, group), 1)
    within = place - first * column_tiles
    return first + within % size, within // size


@gluon.jit
def send_work(ring, use, work):
    i = gl.arange(0, 4, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    numbers = gl.where(i == 0, work.expert, work.row)
    numbers = gl.where(i == 2, work.rows, numbers)
    numbers = gl.where(i == 3, work.column_tile, numbers)
    ring.send(use, numbers)


@gluon.jit
def receive_work(ring, use):
    numbers = ring.receive(use)
    return Work(_number(numbers, 0), _number(numbers, 1), _number(numbers, 2), _number(numbers, 3))


@gluon.jit
def _number(numbers, I: gl.constexpr):
    i = gl.arange(0, 4, layout=numbers.type.layout)
    return gl.sum(gl.where(i == I, numbers, 0), 0)
