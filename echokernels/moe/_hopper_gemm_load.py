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

from echokernels.attention._hopper_memory import BLOCK_ROWS
from echokernels.moe._hopper_gemm_memory import BLOCK_K
from echokernels.moe._hopper_gemm_work import count_tiles, receive_work, send_work, work_of


@gluon.jit
def load(x_desc, weight_desc, works, stages, call):
    """Takes tiles and tells the others; loads their weights, and rows of x that stand in order."""
    counts = count_tiles(call)
    tile = gl.program_id(0)
    work = work_of(tile, counts, call)
    steps = call.steps()
    used = 0
    turn = 0
    while work.rows > 0:
        send_work(works, turn, work)
        for step in range(steps):
            _load_stage(x_desc, weight_desc, stages, used + step, step * BLOCK_K, work, call)
        used += steps
        turn += 1
        tile += gl.num_programs(0)
        work = work_of(tile, counts, call)
    send_work(works, turn, work)


@gluon.jit
def _load_stage(x_desc, weight_desc, stages, use, column, work, call):
    S: gl.constexpr = call.S
    CONSUMERS: gl.constexpr = S.consumers
    HALF: gl.constexpr = S.block_w // 2
    BYTES: gl.constexpr = weight_desc.dtype.primitive_bitwidth // 8
    WEIGHT_BYTES: gl.constexpr = S.block_w * BLOCK_K * BYTES
    ROW_BYTES: gl.constexpr = BLOCK_ROWS * BLOCK_K * BYTES
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
    if not S.gathers:
        for c in gl.static_range(CONSUMERS):
            tma.async_copy_global_to_shared(
                x_desc, [work.row + c * BLOCK_ROWS, column], full, stages.rows_of(use, c),
                pred=work.rows > c * BLOCK_ROWS,
            )  # fmt: skip


@gluon.jit
def gather(x_ptr, x_stride, works, stages, call):
    """Copies the rows of x that a tile's choices are of. x_stride: in units of 16 bytes."""
    S: gl.constexpr = call.S
    CONSUMERS: gl.constexpr = S.consumers
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    d = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, layout))
    steps = call.steps()
    used = 0
    turn = 0
    work = receive_work(works, turn)
    while work.rows > 0:
        sources = ()
        masks = ()
        for c in gl.static_range(CONSUMERS):
            row = c * BLOCK_ROWS + gl.arange(0, BLOCK_ROWS, layout=gl.SliceLayout(1, layout))
            exists = row < work.rows
            choice = gl.load(call.choices_ptr + work.row + row, mask=exists, other=0)
            at = (choice // call.k).to(gl.int64) * x_stride
            sources += (x_ptr + (at * 8)[:, None] + d[None, :],)  # type: ignore[assignment]
            masks += (exists[:, None],)  # type: ignore[assignment]
        for step in range(steps):
            use = used + step
            stages.weights.wait_empty(use)
            for c in gl.static_range(CONSUMERS):
                mask = masks[c]
                if not S.even_k:
                    # Eight columns at a time, K is a multiple of that.
                    mask = mask & (d // 8 + step * (BLOCK_K // 8) < call.K // 8)[None, :]
                async_copy.async_copy_global_to_shared(
                    stages.rows_of(use, c), sources[c] + step * BLOCK_K, mask=mask
                )
            stages.weights.arrive_after_copies(use)
        used += steps
        turn += 1
        work = receive_work(works, turn)
