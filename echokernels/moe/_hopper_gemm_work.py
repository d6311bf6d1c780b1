"""Tiles of the grouped product for Hopper, counted over all experts from where their rows begin.

One warp counts and tells the others. Programs take tiles in turn. Those that run at the same time
share weights, and rows of x: groups of row tiles of an expert walk along its weight tiles.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from echokernels._gluon_compat import aggregate
from echokernels.attention._hopper_memory import BLOCK_ROWS, number_of
from echokernels.moe._tiles import place_of


@aggregate
class Work:
    """One tile."""

    expert: gl.tensor
    row: gl.tensor  # the first
    rows: gl.tensor  # of the expert from there on; 0: there is no more work
    column_tile: gl.tensor


@aggregate
class Counts:
    """Of tiles."""

    end: gl.tensor  # [block_e]: of all experts up to each
    total: gl.tensor
    columns: gl.tensor  # in a row of tiles


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _row_tiles(rows, S: gl.constexpr):
    return gl.cdiv(rows, S.consumers * BLOCK_ROWS)


@gluon.jit
def _rows_of(expert, call):
    """(begin, end) of the rows of experts; of one that does not exist (0, 0)."""
    exists = expert < call.num_experts
    begin = gl.load(call.offsets_ptr + expert, mask=exists, other=0).to(gl.int32)
    return begin, gl.load(call.offsets_ptr + expert + 1, mask=exists, other=0).to(gl.int32)


@gluon.jit
def count_tiles(call):
    S: gl.constexpr = call.S
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    begin, end = _rows_of(gl.arange(0, S.block_e, layout=layout), call)
    columns = gl.cdiv(call.width, S.block_w // 2 if S.gated else S.block_w)
    tiles = _row_tiles(end - begin, S) * columns
    return Counts(gl.associative_scan(tiles, 0, _add), gl.sum(tiles, 0), columns)


@gluon.jit
def work_of(tile, counts, call):
    S: gl.constexpr = call.S
    expert = gl.sum((counts.end <= tile).to(gl.int32), 0)
    before = gl.max(gl.where(counts.end <= tile, counts.end, 0), 0)
    begin, end = _rows_of(expert, call)
    row_tiles = _row_tiles(end - begin, S)
    row_tile, column_tile = place_of(tile - before, row_tiles, counts.columns, call.group)
    row = begin + row_tile * (S.consumers * BLOCK_ROWS)
    return Work(expert, row, gl.where(tile < counts.total, end - row, 0), column_tile)


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
    return Work(
        number_of(numbers, 0), number_of(numbers, 1), number_of(numbers, 2), number_of(numbers, 3)
    )
