"""Results of the Hopper decode: outputs of whole sequences, and pieces of others until they merge.

A share has two pieces at most: the end of a sequence that began before, and the beginning of one
that goes on. So the workspace depends on the number of programs alone. The last program to write a
piece of a sequence merges them all, those of many pieces in two levels.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from echokernels._gluon_compat import barrier
from echokernels.attention._hopper_memory import accumulator_layout

_LOG2_E = gl.constexpr(1.4426950408889634)
_LN_2 = gl.constexpr(0.6931471805599453)
_NOTHING = gl.constexpr(float("-inf"))
# Pieces that one program merges before others go on, and those that one program merges alone: a
# group costs a store and a count.
_GROUP = gl.constexpr(16)
_MOST_UNGROUPED = gl.constexpr(32)


@gluon.constexpr_function
def columns(rows):
    """Of the products: WGMMA has 8 at least."""
    return max(rows, 8)


@gluon.jit
def rows_of(q_len, call, R: gl.constexpr, layout: gl.constexpr):
    """(query, head of the group, whether there is such a query) of each row."""
    S: gl.constexpr = call.S
    row = gl.arange(0, R, layout=layout)
    return row // S.group, row % S.group, (row < call.rows) & (row // S.group < q_len)


@gluon.jit
def store_output(acc, m, l, start, q_len, kv_head, call):
    """acc: [block_d, rows]; m, in base 2, and l: [rows]."""
    S: gl.constexpr = call.S
    D: gl.constexpr = S.block_d
    L: gl.constexpr = acc.type.layout
    token, member, used = rows_of(q_len, call, acc.shape[1], gl.SliceLayout(0, L))
    head = (kv_head * S.group + member).to(gl.int64)
    if S.has_sinks:
        # The sink is one more score, which has no value.
        sink = gl.load(call.sinks_ptr + head, mask=used, other=0.0).to(gl.float32)
        sink = sink * _LOG2_E
        top = gl.maximum(m, sink)
        finite = gl.where(top == _NOTHING, 0.0, top)
        own = gl.exp2(m - finite)
        acc = acc * own[None, :]
        l = l * own + gl.exp2(sink - finite)
        m = top
    out = acc * gl.where(l > 0, 1.0 / l, 0.0)[None, :]
    token = (start + token).to(gl.int64)
    d = gl.arange(0, D, layout=gl.SliceLayout(1, L))[:, None]
    ptr = call.out_ptr + token * call.out_stride_token + head * call.out_stride_head
    out = out.to(call.out_ptr.dtype.element_ty)
    gl.store(ptr[None, :] + d, out, mask=used[None, :] & (d < S.head_dim))
    if S.has_lse:
        lse = gl.where(l > 0, (m + gl.log2(l)) * _LN_2, _NOTHING)
        ptr = call.lse_ptr + head * call.lse_stride_head + token * call.lse_stride_token
        gl.store(ptr, lse, mask=used)


@gluon.jit
def store_piece(acc, m, l, program, is_end, call):
    """is_end: of a sequence that began before the program's share; else of one that goes on."""
    S: gl.constexpr = call.S
    D: gl.constexpr = S.block_d
    L: gl.constexpr = acc.type.layout
    row = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, L))
    place = (program * 2 + is_end.to(gl.int32)) * call.rows + row
    d = gl.arange(0, D, layout=gl.SliceLayout(1, L))[:, None]
    out = acc * gl.where(l > 0, 1.0 / l, 0.0)[None, :]
    gl.store(
        call.piece_out_ptr + place[None, :] * S.head_dim + d,
        out,
        mask=(row < call.rows)[None, :] & (d < S.head_dim),
    )
    lse = gl.where(l > 0, m + gl.log2(l), _NOTHING)
    gl.store(call.piece_lse_ptr + place, lse, mask=row < call.rows)


@gluon.jit
def finish(acc, m, l, tile, count, tiles, at, shares, start, q_len, kv_head, call):
    """Stores what `count` of a sequence's tiles gave, from `tile` of it on, which is `at` of all;
    or a piece, if others have more of its tiles."""
    if count == tiles:
        store_output(acc, m, l, start, q_len, kv_head, call)
    else:
        store_piece(acc, m, l, gl.program_id(0), tile > 0, call)
        low, high = shares.cuts_within(at - tile, at - tile + tiles)
        merge_when_last(low - 1, high - low + 2, start, q_len, kv_head, call)


@gluon.jit
def merge_when_last(first, count, start, q_len, kv_head, call):
    """Counts a piece of a sequence that was written, one of `count` from share `first` on. The
    program that counts the last one merges them all. Of many, it merges those of its group, and the
    last of these programs what they left."""
    stride = 1
    while count > 0:
        is_grouped = (stride == 1) & (count > _MOST_UNGROUPED)
        begin = 0
        members = count
        place = first
        if is_grouped:
            begin = (gl.program_id(0) // call.kv_heads - first) // _GROUP * _GROUP
            members = gl.minimum(count - begin, _GROUP)
            # A share that has nothing but keys of this sequence, so the counter is no other's.
            place = first + gl.maximum(begin - 1, 1)
        counter = call.counter_ptr + place * call.kv_heads + kv_head
        barrier()
        if gl.atomic_add(counter, 1, sem="acq_rel") == members - 1:
            gl.store(counter, 0)
            acc, m, l = _merge(first, begin, members, stride, kv_head, call)
            if is_grouped:
                # Every thread has read: the first piece gives way.
                barrier()
                program = (first + begin) * call.kv_heads + kv_head
                store_piece(acc, m, l, program, begin > 0, call)
                stride = _GROUP
                count = gl.cdiv(count, _GROUP)
            else:
                store_output(acc, m, l, start, q_len, kv_head, call)
                count = 0
        else:
            count = 0


@gluon.jit
def _merge(first, start, count, stride, kv_head, call):
    """(accumulator f32[block_d, rows], largest score, sum of weights) of `count` pieces of a
    sequence that begins in share `first`, every stride-th from number `start` on. Other programs
    wrote them: the L1 cache is passed by."""
    S: gl.constexpr = call.S
    D: gl.constexpr = S.block_d
    R: gl.constexpr = S.most_rows
    PIECES: gl.constexpr = 64 // R if R <= 16 else 1  # read at a time: as registers allow
    CUBE: gl.constexpr = _cube_layout(PIECES, R, D)
    PLANE: gl.constexpr = gl.SliceLayout(2, CUBE)
    row = gl.arange(0, R, layout=gl.SliceLayout(0, PLANE))
    piece = gl.arange(0, PIECES, layout=gl.SliceLayout(1, PLANE))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, gl.SliceLayout(0, CUBE)))
    d = gl.expand_dims(gl.expand_dims(d, 0), 0)
    acc = gl.zeros([R, D], gl.float32, gl.SliceLayout(0, CUBE))
    m = gl.full([R], _NOTHING, gl.float32, gl.SliceLayout(0, PLANE))
    l = gl.zeros([R], gl.float32, gl.SliceLayout(0, PLANE))
    for begin in range(0, count, PIECES):
        number = start + (begin + piece) * stride
        program = (first + number) * call.kv_heads + kv_head
        place = (program * 2 + (number > 0).to(gl.int32))[:, None] * call.rows + row[None, :]
        mask = (begin + piece < count)[:, None] & (row < call.rows)[None, :]
        lse = gl.load(call.piece_lse_ptr + place, mask=mask, other=_NOTHING, cache_modifier=".cg")
        at = gl.expand_dims(place * S.head_dim, 2) + d
        out = gl.load(
            call.piece_out_ptr + at,
            mask=gl.expand_dims(mask, 2) & (d < S.head_dim),
            other=0.0,
            cache_modifier=".cg",
        )
        top = gl.maximum(m, gl.max(lse, 0))
        finite = gl.where(top == _NOTHING, 0.0, top)
        weight = gl.exp2(lse - finite[None, :])
        alpha = gl.exp2(m - finite)
        weighed = gl.sum(out * gl.expand_dims(weight, 2), 0)
        scale = gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))
        acc = acc * scale[:, None] + weighed
        l = l * alpha + gl.sum(weight, 0)
        m = top
    OUT: gl.constexpr = _output_layout(R, D)
    COLUMN: gl.constexpr = gl.SliceLayout(0, OUT)
    acc = gl.convert_layout(gl.permute(acc, (1, 0)), OUT)
    m = gl.convert_layout(m, COLUMN)
    return acc, m, gl.convert_layout(l, COLUMN)


@gluon.constexpr_function
def _cube_layout(pieces, rows, columns):
    """Four neighbours in a row to a thread, and rows to warps as far as there are any."""
    across = min(columns // 4, 32)
    warps = min(rows, 4)
    return gl.BlockedLayout(
        [pieces * warps // 4, 1, 4], [1, 32 // across, across], [4 // warps, warps, 1], [2, 1, 0]
    )


@gluon.constexpr_function
def _output_layout(rows, columns):
    across = min(columns // 4, 32)
    warps = min(rows, 4)
    return gl.BlockedLayout([4, 1], [across, 32 // across], [4 // warps, warps], [0, 1])


@gluon.jit
def fill_empty(call):
    """Outputs of sequences without keys, the program's part of them."""
    S: gl.constexpr = call.S
    D: gl.constexpr = S.block_d
    R: gl.constexpr = columns(S.most_rows)
    L: gl.constexpr = accumulator_layout(R)
    COLUMN: gl.constexpr = gl.SliceLayout(0, L)
    kv_head = gl.program_id(0) % call.kv_heads
    share = gl.program_id(0) // call.kv_heads
    for seq in range(share, call.num_seqs, gl.num_programs(0) // call.kv_heads):
        start, q_len, k_len = call.lengths(seq, seq < call.num_seqs)
        if k_len == 0:
            zeros = gl.zeros([D, R], gl.float32, L)
            nothing = gl.full([R], _NOTHING, gl.float32, COLUMN)
            none = gl.zeros([R], gl.float32, COLUMN)
            store_output(zeros, nothing, none, start, q_len, kv_head, call)
