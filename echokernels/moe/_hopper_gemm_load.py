"""What loads for the grouped product on Hopper: a warp by TMA, and two that gather.

A tile's weight rows come as two boxes: gates and the ups of the same outputs with an activation, or
two neighbours. Rows of x that stand in order come by TMA as well, a box for each consumer; those
behind the expert's are other experts' or zeros, and nothing of them is stored. TMA cannot gather
rows, so then each thread copies some (cp.async).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from echokernels._pdl import let_next_start, wait_for_previous
from echokernels.attention._hopper_memory import BLOCK_ROWS
from echokernels.moe._hopper_gemm_memory import BLOCK_K
from echokernels.moe._hopper_gemm_work import count_tiles, receive_work, send_work, work_of


@gluon.jit
def load(x_desc, weight_desc, works, stages, call, PDL: gl.constexpr):
    """Takes tiles and tells the others; loads their weights, and rows of x that stand in order."""
    S: gl.constexpr = call.S
    counts = count_tiles(call)
    tile = gl.program_id(0)
    work = work_of(tile, counts, call)
    send_work(works, 0, work)
    steps = call.steps()
    begun = 0
    if S.early_weights:
        begun = gl.where(work.rows > 0, gl.minimum(steps, S.slots), 0)
        for step in range(begun):
            _load_weights(weight_desc, stages, step, step, work, call)
        wait_for_previous(PDL)
        let_next_start(PDL)
        for step in range(begun):
            _load_rows(x_desc, stages, step, step, work, call)
    used = 0
    turn = 0
    while work.rows > 0:
        turn += 1
        tile += gl.num_programs(0)
        few = gl.minimum(steps, gl.maximum(begun, 2))
        for step in range(begun, few):
            _load_stage(x_desc, weight_desc, stages, used + step, step, work, call)
        # Now, for the stages on their way give the time that finding it takes.
        next_work = work_of(tile, counts, call)
        send_work(works, turn, next_work)
        for step in range(few, steps):
            _load_stage(x_desc, weight_desc, stages, used + step, step, work, call)
        used += steps
        begun = 0
        work = next_work


@gluon.jit
def _load_stage(x_desc, weight_desc, stages, use, step, work, call):
    S: gl.constexpr = call.S
    _load_weights(weight_desc, stages, use, step, work, call)
    if not S.gathers:
        _load_rows(x_desc, stages, use, step, work, call)


@gluon.jit
def _load_weights(weight_desc, stages, use, step, work, call):
    """And expects all that comes by TMA."""
    S: gl.constexpr = call.S
    CONSUMERS: gl.constexpr = S.consumers
    HALF: gl.constexpr = S.block_w // 2
    BYTES: gl.constexpr = weight_desc.dtype.primitive_bitwidth // 8
    WEIGHT_BYTES: gl.constexpr = S.block_w * BLOCK_K * BYTES
    ROW_BYTES: gl.constexpr = BLOCK_ROWS * BLOCK_K * BYTES
    column = step * BLOCK_K
    full = stages.full(use)
    stages.weights.wait_empty(use)
    if S.gathers:
        mbarrier.expect(full, WEIGHT_BYTES)
    else:
        # The expectations of as many boxes as there are consumers with rows.
        for c in gl.static_range(CONSUMERS):
            last = work.rows > c * BLOCK_ROWS
            if c + 1 < CONSUMERS:
                last = last & (work.rows <= (c + 1) * BLOCK_ROWS)
            mbarrier.expect(full, WEIGHT_BYTES + (c + 1) * ROW_BYTES, pred=last)
    weights = stages.weights.tile(use).reshape([2, HALF, BLOCK_K])
    if S.gated:
        first = work.column_tile * HALF
        second = first + call.width
    else:
        first = work.column_tile * S.block_w
        second = first + HALF
    tma.async_copy_global_to_shared(
        weight_desc, [work.expert, first, column], full, weights.slice(0, 1, 0)
    )
    tma.async_copy_global_to_shared(
        weight_desc, [work.expert, second, column], full, weights.slice(1, 1, 0)
    )


@gluon.jit
def _load_rows(x_desc, stages, use, step, work, call):
    CONSUMERS: gl.constexpr = call.S.consumers
    for c in gl.static_range(CONSUMERS):
        tma.async_copy_global_to_shared(
            x_desc, [work.row + c * BLOCK_ROWS, step * BLOCK_K], stages.full(use),
            stages.rows_of(use, c), pred=work.rows > c * BLOCK_ROWS,
        )  # fmt: skip


@gluon.jit
def gather(x_ptr, x_stride, works, stages, call):
    """Copies the rows of x that a tile's choices are of. x_stride: in units of 16 bytes."""
    work = receive_work(works, 0)
    places = _places_of(work, x_stride, call)
    steps = call.steps()
    used = 0
    turn = 0
    while work.rows > 0:
        turn += 1
        begun = gl.minimum(steps, 2)
        _copy_rows(x_ptr, places, stages, used, 0, begun, work, call)
        # Of the next tile, while this one is multiplied. It is known by now.
        next_work = receive_work(works, turn)
        next_places = _places_of(next_work, x_stride, call)
        _copy_rows(x_ptr, places, stages, used, begun, steps, work, call)
        used += steps
        work = next_work
        places = next_places


@gluon.constexpr_function
def _copy_layout(num_warps):
    """Of a consumer's rows of a stage: a thread copies 16 bytes."""
    return gl.BlockedLayout([1, 8], [4, 8], [num_warps, 1], [1, 0])


@gluon.jit
def _places_of(work, x_stride, call):
    """For each consumer where in x its rows are, in units of 16 bytes: i32[BLOCK_ROWS]."""
    CONSUMERS: gl.constexpr = call.S.consumers
    layout: gl.constexpr = _copy_layout(gl.num_warps())
    places = ()
    for c in gl.static_range(CONSUMERS):
        row = c * BLOCK_ROWS + gl.arange(0, BLOCK_ROWS, layout=gl.SliceLayout(1, layout))
        choice = gl.load(call.choices_ptr + work.row + row, mask=row < work.rows, other=0)
        places += (choice // call.k * x_stride,)  # type: ignore[assignment]
    return places


@gluon.jit
def _copy_rows(x_ptr, places, stages, used, begin, end, work, call):
    """The stages [begin, end) of a tile."""
    S: gl.constexpr = call.S
    CONSUMERS: gl.constexpr = S.consumers
    layout: gl.constexpr = _copy_layout(gl.num_warps())
    i = gl.arange(0, BLOCK_ROWS, layout=gl.SliceLayout(1, layout))
    d = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, layout))
    for step in range(begin, end):
        stages.weights.wait_empty(used + step)
        for c in gl.static_range(CONSUMERS):
            mask = (c * BLOCK_ROWS + i < work.rows)[:, None]
            if not S.even_k:
                # Eight columns at a time, K is a multiple of that.
                mask = mask & (d // 8 + step * (BLOCK_K // 8) < call.K // 8)[None, :]
            at = (places[c] + step * (BLOCK_K // 8)).to(gl.int64)
            async_copy.async_copy_global_to_shared(
                stages.rows_of(used + step, c), x_ptr + (at * 8)[:, None] + d[None, :], mask=mask
            )
        stages.weights.arrive_after_copies(used + step)
