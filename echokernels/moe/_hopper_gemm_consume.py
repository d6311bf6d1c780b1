"""A consumer of the grouped product on Hopper: 64 rows of a tile, by WGMMA.

The first half of what it accumulates is of the tile's first box of weight rows. With an activation
that is gates, and the other half ups: of an output both are in the same thread.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from echokernels.activation.gated import activate
from echokernels.attention._hopper_memory import BLOCK_ROWS, accumulator_layout
from echokernels.moe._hopper_gemm_work import receive_work


@gluon.jit
def consume(consumer: gl.constexpr, out_desc, out_tiles, works, stages, call):
    steps = call.steps()
    used = 0
    turn = 0
    work = receive_work(works, turn)
    while work.rows > 0:
        if work.rows > consumer * BLOCK_ROWS:
            acc = _multiply(consumer, stages, used, steps, call)
            _finish(consumer, acc, out_desc, out_tiles.index(consumer), work, call)
        else:
            _pass_over(stages, used, steps)
        used += steps
        turn += 1
        work = receive_work(works, turn)
    tma.store_wait(0)


@gluon.jit
def _pass_over(stages, used, steps):
    """Stages of a tile whose rows are all of the consumers before this one."""
    for step in range(steps):
        stages.weights.wait_full(used + step)
        stages.weights.release(used + step)


@gluon.jit
def _multiply(consumer: gl.constexpr, stages, used, steps, call):
    S: gl.constexpr = call.S
    W: gl.constexpr = S.block_w
    acc = gl.zeros([BLOCK_ROWS, W], gl.float32, accumulator_layout(W))
    for step in range(steps):
        use = used + step
        stages.weights.wait_full(use)
        if S.gathers:
            fence_async_shared()
        x = stages.rows_of(use, consumer)
        weights = stages.weights.tile(use).permute((1, 0))
        product = warpgroup_mma(x, weights, acc, is_async=True)
        # While this stage is multiplied, the one before is done and can be loaded again.
        acc = warpgroup_mma_wait(1, [product])
        before = (use + S.slots - 1) % S.slots
        mbarrier.arrive(stages.weights.empty.index(before), pred=step > 0)
    acc = warpgroup_mma_wait(0, [acc])
    stages.weights.release(used + steps - 1)
    return acc


@gluon.jit
def _finish(consumer: gl.constexpr, acc, out_desc, out_tile, work, call):
    S: gl.constexpr = call.S
    HALF: gl.constexpr = S.block_w // 2
    row = work.row + consumer * BLOCK_ROWS
    rows = work.rows - consumer * BLOCK_ROWS
    first, second = _halves(acc)
    if S.gated:
        ACTIVATION: gl.constexpr = S.activation
        out = activate(first, ACTIVATION) * second
        _store(out, row, rows, work.column_tile * HALF, out_desc, out_tile, call)
    else:
        column = work.column_tile * S.block_w
        _store(first, row, rows, column, out_desc, out_tile, call)
        _store(second, row, rows, column + HALF, out_desc, out_tile, call)


@gluon.jit
def _halves(acc):
    """The left and the right columns, without a move: a thread has columns of both."""
    HALF: gl.constexpr = acc.shape[1] // 2
    pairs = gl.permute(gl.reshape(acc, [BLOCK_ROWS, 2, HALF]), (0, 2, 1))
    return gl.split(pairs)


@gluon.jit
def _store(out, row, rows, column, out_desc, out_tile, call):
    """The tile of `out` at (row, column), of which `rows` rows are the expert's."""
    S: gl.constexpr = call.S
    if S.has_row_weights:
        i = gl.arange(0, BLOCK_ROWS, layout=gl.SliceLayout(1, out.type.layout))
        weights = gl.load(call.row_weights_ptr + row + i, mask=i < rows, other=0.0)
        out = out * weights[:, None]
    out = out.to(call.out_ptr.dtype.element_ty)
    if S.even_width and rows >= BLOCK_ROWS:
        tma.store_wait(0)  # what was stored from here before has been read
        out_tile.store(out)
        fence_async_shared()
        tma.async_copy_shared_to_global(out_desc, [row, column], out_tile)
    else:
        _store_rows(out, row, rows, column, call)


@gluon.jit
def _store_rows(out, row, rows, column, call):
    """The end of an expert's rows: its neighbour's are not ours."""
    layout: gl.constexpr = out.type.layout
    i = gl.arange(0, out.shape[0], layout=gl.SliceLayout(1, layout))
    columns = column + gl.arange(0, out.shape[1], layout=gl.SliceLayout(0, layout))
    ptr = call.out_ptr + ((row + i).to(gl.int64) * call.out_stride)[:, None] + columns[None, :]
    gl.store(ptr, out, mask=(i < rows)[:, None] & (columns < call.width)[None, :])
