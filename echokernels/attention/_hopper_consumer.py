"""A consumer of the Hopper prefill: 64 queries of a tile over the key tiles they see, last first.

The scores of a key tile go to the tensor cores together with the product of the weights of the tile
before and its values (FlashAttention-3; Shah et al., 2024). While a consumer takes exponentials,
the others multiply.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from echokernels._gluon_compat import aggregate
from echokernels.attention._hopper_convert import queries_in_fp16
from echokernels.attention._hopper_memory import BLOCK_ROWS, accumulator_layout, zero_rows
from echokernels.attention._hopper_softmax import (
    NOTHING,
    as_operand,
    of_threads,
    per_column,
    per_row,
    row_layout,
    scaled_down,
    weigh,
    weigh_on,
)
from echokernels.attention._hopper_work import (
    key_tiles,
    own_end,
    receive_work,
    unmasked_tiles,
)

_LOG2_E = gl.constexpr(1.4426950408889634)
_LN_2 = gl.constexpr(0.6931471805599453)


@aggregate
class Rows:
    """What scores of a consumer's rows depend on besides the key."""

    position: gl.tensor  # of the first row, counted in keys
    k_len: gl.tensor
    slope: gl.tensor  # in base 2; used with ALiBi only
    unit: gl.tensor  # of the queries, [rows, 4] of `row_layout`; used with codes only


@gluon.jit
def consume(
    consumer: gl.constexpr, out_desc, out_tiles, works, q_ring, k_ring, v_ring, scales, call
):
    S: gl.constexpr = call.S
    used = 0  # key tiles so far
    turn = 0
    work = receive_work(works, turn)
    while work.seq >= 0:
        position = work.position + consumer * BLOCK_ROWS
        begin, end = key_tiles(call, work)
        last = own_end(call, position, begin, end)
        for _ in range(end - last):
            # Of the consumers after this one only.
            k_ring.wait_full(used)
            k_ring.release(used)
            v_ring.wait_full(used)
            v_ring.release(used)
            used += 1
        end = last
        full_begin, full_end = unmasked_tiles(call, work, position, begin, end)

        q_use = turn * S.consumers + consumer
        q_ring.wait_full(q_use)
        q = q_ring.tile(q_use)
        unit = call.scale
        if S.has_codes:
            q, unit = queries_in_fp16(q)
            unit = _to_multiply(unit, call)
        rows = _rows(position, unit, call, work)
        acc, base, l, p = _first_tile(q, k_ring, v_ring, scales, used, end - 1, rows, call)
        used += 1
        acc, base, l, p, used = _next_tiles(
            q,
            k_ring,
            v_ring,
            scales,
            used,
            acc,
            base,
            l,
            p,
            full_end,
            end - 1,
            rows,
            call,
            MASKED=True,
        )
        if not S.masks_all:
            acc, base, l, p, used = _next_tiles(
                q, k_ring, v_ring, scales, used, acc, base, l, p, full_begin, full_end, rows, call,
                MASKED=False,
            )  # fmt: skip
            if S.has_left:
                acc, base, l, p, used = _next_tiles(
                    q, k_ring, v_ring, scales, used, acc, base, l, p, begin, full_begin, rows, call,
                    MASKED=True,
                )  # fmt: skip
        q_ring.release(q_use)

        v_ring.wait_full(used - 1)
        OUT: gl.constexpr = acc.type.layout
        p = as_operand(p, v_ring.tiles.dtype, OUT)
        product = warpgroup_mma(p, v_ring.tile(used - 1), acc, is_async=True)
        turn += 1
        next_work = receive_work(works, turn)
        acc = warpgroup_mma_wait(0, [product])
        v_ring.release(used - 1)
        out, lse = _finish(acc, base, l, work.head, call)
        if S.has_lse:
            _store_lse(consumer, lse, work, call)
        _store_out(consumer, out, out_desc, out_tiles, work, call)
        work = next_work
    if S.stages_output:
        tma.store_wait(0)


@gluon.jit
def _rows(position, unit, call, work):
    S: gl.constexpr = call.S
    slope = call.scale
    if S.has_alibi:
        slope = gl.load(call.slopes_ptr + work.seq * call.slopes_stride + work.head) * _LOG2_E
    return Rows(position, work.k_len, slope, unit)


@gluon.jit
def _first_tile(q, k_ring, v_ring, scales, use, tile, rows, call):
    """(accumulator, base, sum, weights) after the last key tile, which may have an end."""
    S: gl.constexpr = call.S
    BLOCK_D: gl.constexpr = S.block_d
    OUT: gl.constexpr = accumulator_layout(BLOCK_D)
    k_ring.wait_full(use)
    scores = _multiply(q, k_ring.tile(use))
    unit, lift = _units(scales, use, rows, call)
    s = warpgroup_mma_wait(0, [scores])
    k_ring.release(use)
    s = of_threads(_mask(_bias(s, unit, tile, rows, call), tile, rows, call))
    base = gl.full([BLOCK_ROWS, 4], NOTHING, gl.float32, row_layout(s.type.layout))
    p, l, base, _ = weigh(s, base, unit, lift, S, v_ring.tiles.dtype)
    if not S.has_codes:  # those beyond the end have a scale of 0
        valid = rows.k_len - tile * S.block_n
        if valid < S.block_n:
            v_ring.wait_full(use)
            zero_rows(v_ring.tile(use), valid)
    acc = gl.zeros([BLOCK_ROWS, BLOCK_D], gl.float32, OUT)
    return acc, base, l, p


@gluon.jit
def _next_tiles(
    q, k_ring, v_ring, scales, used, acc, base, l, p, begin, end, rows, call, MASKED: gl.constexpr
):
    """The same after the tiles from `end` - 1 down to `begin`, and how many there were so far."""
    for i in range(end - begin):
        acc, base, l, p = _next_tile(
            q, k_ring, v_ring, scales, used, acc, base, l, p, end - 1 - i, rows, call, MASKED
        )
        used += 1
    return acc, base, l, p, used


@gluon.jit
def _next_tile(
    q, k_ring, v_ring, scales, use, acc, base, l, p, tile, rows, call, MASKED: gl.constexpr
):
    """The same after one more key tile; multiplies the weights of the one before."""
    S: gl.constexpr = call.S
    OUT: gl.constexpr = acc.type.layout
    p = as_operand(p, v_ring.tiles.dtype, OUT)
    k_ring.wait_full(use)
    scores = _multiply(q, k_ring.tile(use))
    v_ring.wait_full(use - 1)
    product = warpgroup_mma(p, v_ring.tile(use - 1), acc, is_async=True)
    unit, lift = _units(scales, use, rows, call)
    s = warpgroup_mma_wait(1, [scores])
    k_ring.release(use)
    s = _bias(s, unit, tile, rows, call)
    # Before the exponentials: the registers of the last weights are needed for the next.
    acc = warpgroup_mma_wait(0, [product])
    v_ring.release(use - 1)
    dtype: gl.constexpr = v_ring.tiles.dtype
    if MASKED:
        s = of_threads(_mask(s, tile, rows, call))
        p, sums, base, growth = weigh(s, base, unit, lift, S, dtype)
    else:
        p, sums, base, growth = weigh_on(of_threads(s), base, unit, lift, S, dtype)
    return scaled_down(acc, growth), base, l * gl.exp2(-growth) + sums, p


@gluon.jit
def _to_multiply(unit, call):
    """As `Rows` holds units of queries."""
    S: gl.constexpr = call.S
    BLOCK_N: gl.constexpr = S.block_n
    scores = gl.zeros([BLOCK_ROWS, BLOCK_N], gl.float32, accumulator_layout(BLOCK_N))
    ROWS: gl.constexpr = row_layout(of_threads(scores).type.layout)
    if not (S.has_softcap or S.has_alibi):
        unit *= call.scale
    return per_row(unit, ROWS)


@gluon.jit
def _units(scales, use, rows, call):
    """(what scores of a key tile are to be multiplied with, log2 of what its values are)."""
    S: gl.constexpr = call.S
    unit = rows.unit
    lift = call.scale
    if S.has_codes:
        of_tile = scales.unit(use)
        unit = unit * of_tile.of_keys
        lift = of_tile.log2_of_values
    return unit, lift


@gluon.jit
def _multiply(q, k):
    """q k^T, in flight."""
    BLOCK_N: gl.constexpr = k.shape[0]
    zero = gl.zeros([BLOCK_ROWS, BLOCK_N], gl.float32, accumulator_layout(BLOCK_N))
    return warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _places(s, tile, rows):
    """(key, position of the query) of each score."""
    BLOCK_N: gl.constexpr = s.shape[1]
    key = tile * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, s.type.layout))
    at = rows.position + gl.arange(0, BLOCK_ROWS, layout=gl.SliceLayout(1, s.type.layout))
    return key[None, :], at[:, None]


@gluon.jit
def _bias(s, unit, tile, rows, call):
    """Capped and lowered by ALiBi. With either, scores are scaled here, else when weighed."""
    S: gl.constexpr = call.S
    if S.has_codes and (S.has_softcap or S.has_alibi):
        s = gl.convert_layout(gl.reshape(of_threads(s) * per_column(unit), s.shape), s.type.layout)
    if S.has_softcap:
        # cap * tanh(s * scale / cap); an exponential that overflows gives 1.
        twice = 2.0 * _LOG2_E * call.scale / call.cap
        s = call.cap - 2.0 * call.cap / (1.0 + gl.exp2(s * twice))
    elif S.has_alibi:
        s = s * call.scale
    if S.has_alibi:
        key, at = _places(s, tile, rows)
        s -= rows.slope * gl.abs(at - key).to(gl.float32)
    return s


@gluon.jit
def _mask(s, tile, rows, call):
    S: gl.constexpr = call.S
    BLOCK_N: gl.constexpr = s.shape[1]
    key = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, s.type.layout))[None, :]
    row = gl.arange(0, BLOCK_ROWS, layout=gl.SliceLayout(1, s.type.layout))[:, None]
    at = row + (rows.position - tile * BLOCK_N)
    last = row * 0 + (rows.k_len - 1 - tile * BLOCK_N)
    if S.has_right:
        last = gl.minimum(last, at + call.window_right)
    seen = key <= last
    if S.has_left:
        seen = seen & (key >= at - call.window_left)
    return gl.where(seen, s, NOTHING)


@gluon.jit
def _finish(acc, base, l, head, call):
    """(output, natural-log LSE) of each row; 0 and -inf where nothing was visible."""
    S: gl.constexpr = call.S
    base = gl.max(base, 1)  # the same in the four threads of a row
    l = gl.sum(l, 1)
    factor = gl.full([BLOCK_ROWS], 1.0, gl.float32, base.type.layout)
    if S.has_sinks:
        # The sink is one more score, which has no value.
        sink = gl.load(call.sinks_ptr + head).to(gl.float32) * _LOG2_E
        top = gl.maximum(base, sink)
        finite = gl.where(top == NOTHING, 0.0, top)
        factor = gl.exp2(base - finite)
        l = l * factor + gl.exp2(sink - finite)
        base = top
    factor = gl.where(l > 0, factor / l, 0.0)
    out = acc * gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout))[:, None]
    return out, gl.where(l > 0, base * _LN_2 + gl.log(l), NOTHING)


@gluon.jit
def _store_lse(consumer: gl.constexpr, lse, work, call):
    layout: gl.constexpr = lse.type.layout
    row = consumer * BLOCK_ROWS + gl.arange(0, BLOCK_ROWS, layout=layout)
    ptr = call.lse_ptr + work.head.to(gl.int64) * call.lse_stride_head
    token = (work.row + row).to(gl.int64)
    gl.store(ptr + token * call.lse_stride_token, lse, mask=row < work.rows)


@gluon.jit
def _store_out(consumer: gl.constexpr, out, out_desc, out_tiles, work, call):
    S: gl.constexpr = call.S
    out = out.to(call.out_ptr.dtype.element_ty)
    row = consumer * BLOCK_ROWS
    if not S.stages_output:
        _store_rows(row, out, work, call)
    elif row + BLOCK_ROWS <= work.rows:
        tma.store_wait(0)  # what was stored from here before has been read
        tile = out_tiles.index(consumer)
        tile.store(out)
        fence_async_shared()
        source = tile.reshape([BLOCK_ROWS, 1, S.block_d])
        tma.async_copy_shared_to_global(out_desc, [work.row + row, work.head, 0], source)
    else:
        _store_rows(row, out, work, call)


@gluon.jit
def _store_rows(row, out, work, call):
    """The end of a sequence: its neighbour's rows are not ours."""
    S: gl.constexpr = call.S
    HEAD_DIM: gl.constexpr = S.head_dim
    layout: gl.constexpr = out.type.layout
    rows = row + gl.arange(0, out.shape[0], layout=gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, out.shape[1], layout=gl.SliceLayout(0, layout))[None, :]
    ptr = call.out_ptr + work.head.to(gl.int64) * call.out_stride_head
    ptr += (work.row + rows).to(gl.int64) * call.out_stride_token
    mask = rows < work.rows
    if out.shape[1] > HEAD_DIM:
        mask = mask & (column < HEAD_DIM)
    gl.store(ptr + column, out, mask=mask)
