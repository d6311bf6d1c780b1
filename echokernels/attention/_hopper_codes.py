"""The attending side of the Hopper decode from INT8 pages: codes become operands in registers.

A code is worth two instructions at most, or converting takes longer than loading. So bytes go from
shared memory straight into the operand layout of mma.sync and become fp16 there, by permuting them
under an exponent: 0x6400 | (x ^ 0x80) is 1024 + 128 + x. Of keys the 1152 stays: what it adds to
every score of a row is taken off where the product starts. Values are read as words of four
channels of one token: words of two tokens are permuted into pairs of tokens of one channel, and
four products give every fourth channel each. No byte is moved between threads.

Each warp attends to its own keys of a tile, with its own running maximum: warps meet at the end of
a piece only. Scores are [keys, rows] and outputs [channels, rows], as with WGMMA, whose operands
would have to go back to shared memory.

log2(v_scale) joins the score before the maximum is taken, weights multiply codes as they are, and
the denominator adds weight / v_scale (see `_softmax.py`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from echokernels.attention._hopper_pieces import columns, fill_empty, finish, rows_of
from echokernels.quant._row import MIN_SCALE

_LOG2_E = gl.constexpr(1.4426950408889634)
_NOTHING = gl.constexpr(float("-inf"))
_WARPS = gl.constexpr(4)
# What `_to_biased_fp16` adds.
_BIAS = gl.constexpr(1024.0 + 128.0)
_LEAST_SCALE = gl.constexpr(MIN_SCALE)
# Of scores and weights, [warp, keys, rows], and of outputs, [warp, channels, rows].
_BY_WARP = gl.constexpr(
    gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1, 1], instr_shape=[1, 16, 8])
)
_Q_OPERAND = gl.constexpr(gl.DotOperandLayout(1, _BY_WARP.value, k_width=4))


@gluon.jit
def _to_biased_fp16(x):
    """x + _BIAS of int8, four to a register."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 t, u;
        xor.b32 t, $2, 0x80808080;
        mov.b32 u, 0x64646464;
        prmt.b32 $0, t, u, 0x4140;
        prmt.b32 $1, t, u, 0x4342;
        }""",
        "=r,=r,r",
        [x],
        dtype=gl.float16,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def _channels_to_fp16(words):
    """Of words of two tokens, four channels each: pairs of tokens by channel."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, s, t, u;
        xor.b32 a, $4, 0x80808080;
        xor.b32 b, $5, 0x80808080;
        prmt.b32 s, a, b, 0x5140;
        prmt.b32 t, a, b, 0x7362;
        mov.b32 u, 0x64646464;
        prmt.b32 $0, s, u, 0x4140;
        prmt.b32 $1, s, u, 0x4342;
        prmt.b32 $2, t, u, 0x4140;
        prmt.b32 $3, t, u, 0x4342;
        mov.b32 u, 0x64806480;
        sub.f16x2 $0, $0, u;
        sub.f16x2 $1, $1, u;
        sub.f16x2 $2, $2, u;
        sub.f16x2 $3, $3, u;
        }""",
        "=r,=r,=r,=r,r,r",
        [words],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _log2(x):
    """Of what is not denormal."""
    return gl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _inverse(x):
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def make_sums(D: gl.constexpr, R: gl.constexpr):
    """What warps leave for each other: outputs f32[warps * D // 4, R] of every fourth channel, four
    times; largest scores and sums of weights f32[warps, R]."""
    return (
        _make_sums(_WARPS * D // 4, R), _make_sums(_WARPS * D // 4, R),
        _make_sums(_WARPS * D // 4, R), _make_sums(_WARPS * D // 4, R),
        _make_sums(_WARPS, R), _make_sums(_WARPS, R),
    )  # fmt: skip


@gluon.jit
def _make_sums(ROWS: gl.constexpr, R: gl.constexpr):
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return gl.allocate_shared_memory(gl.float32, [ROWS, R], LAYOUT)


@gluon.jit
def consume_codes(k_ring, v_ring, scales, sums, shares, seq, tile, at, left, has_empty, call):
    """Attends to the tiles of a share."""
    if has_empty:
        fill_empty(call)
    kv_head = gl.program_id(0) % call.kv_heads
    used = 0
    start, q_len, k_len = call.lengths(seq, seq < call.num_seqs)
    q = _load_queries(start, q_len, kv_head, seq < call.num_seqs, call)
    while left > 0:
        first, tiles = call.key_tiles(q_len, k_len)
        count = gl.minimum(tiles - tile, left)
        # The next sequence's are on their way while this one is attended to.
        seq += 1
        exists = seq < call.num_seqs
        next_start, next_q_len, next_k_len = call.lengths(seq, exists)
        next_q = _load_queries(next_start, next_q_len, kv_head, exists, call)
        if count > 0:
            acc, m, l, used = _attend(
                q, k_ring, v_ring, scales, sums, used, first + tile, count, seq - 1, kv_head,
                q_len, k_len, call,
            )  # fmt: skip
            finish(acc, m, l, tile, count, tiles, at, shares, start, q_len, kv_head, call)
        left -= count
        at += count
        tile = 0
        start = next_start
        q_len = next_q_len
        k_len = next_k_len
        q = next_q


@gluon.jit
def _attend(
    q, k_ring, v_ring, scales, sums, used, first, count, seq, kv_head, q_len, k_len, call
):  # fmt: skip
    """(accumulator f32[block_d, rows], largest score, sum of weights [rows], used slots) after
    `count` tiles from the `first`."""
    S: gl.constexpr = call.S
    D: gl.constexpr = S.block_d
    N: gl.constexpr = S.block_n
    R: gl.constexpr = columns(S.most_rows)
    W: gl.constexpr = _WARPS
    OWN: gl.constexpr = N // W  # keys of a warp
    BY_ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, _BY_WARP))
    BY_KEY: gl.constexpr = gl.SliceLayout(2, _BY_WARP)
    K_OPERAND: gl.constexpr = gl.DotOperandLayout(0, _BY_WARP, k_width=4)
    V_OPERAND: gl.constexpr = gl.DotOperandLayout(0, _BY_WARP, k_width=2)
    P_OPERAND: gl.constexpr = gl.DotOperandLayout(1, _BY_WARP, k_width=2)
    WORDS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=D, element_bitwidth=32, rank=2)

    token, member, exists = rows_of(q_len, call, R, BY_ROW)
    position = k_len - q_len + token
    last = position * 0 + k_len - 1
    if S.has_right:
        last = gl.minimum(last, position + call.window_right)
    slope = position.to(gl.float32)
    if S.has_alibi:
        ptr = call.slopes_ptr + seq.to(gl.int64) * call.slopes_stride + kv_head * S.group
        slope = gl.load(ptr + member, mask=exists, other=0.0) * _LOG2_E
    q, unit = _to_fp16(q)
    # Of the products of codes and scaled queries.
    unit = gl.convert_layout(unit, gl.SliceLayout(1, _BY_WARP)) * call.scale
    unit = gl.expand_dims(unit, 1)
    # What the bias of the codes adds to every score of a row.
    bias = gl.sum(q.to(gl.float32), 1) * -_BIAS
    bias = gl.expand_dims(gl.convert_layout(bias, gl.SliceLayout(1, _BY_WARP)), 1)
    last = _of_rows(last)
    position = _of_rows(position)
    slope = _of_rows(slope)

    warp = gl.arange(0, W, layout=gl.SliceLayout(1, BY_KEY))
    key = gl.arange(0, OWN, layout=gl.SliceLayout(0, BY_KEY))
    key = gl.expand_dims(warp[:, None] * OWN + key[None, :], 2)
    m = gl.full([W, R], _NOTHING, gl.float32, gl.SliceLayout(1, _BY_WARP))
    l = gl.zeros([W, OWN, R], gl.float32, _BY_WARP)
    bias = gl.zeros([W, OWN, R], gl.float32, _BY_WARP) + bias
    acc0 = gl.zeros([W, D // 4, R], gl.float32, _BY_WARP)
    acc1 = gl.zeros([W, D // 4, R], gl.float32, _BY_WARP)
    acc2 = gl.zeros([W, D // 4, R], gl.float32, _BY_WARP)
    acc3 = gl.zeros([W, D // 4, R], gl.float32, _BY_WARP)
    for i in range(count):
        at = (first + i) * N + key
        k_ring.wait_full(used)
        k = k_ring.tile(used).reshape([W, OWN, D]).load(K_OPERAND)
        k_scale = scales.k_tiles.index(used % S.slots).reshape([W, OWN]).load(BY_KEY)
        v_scale = scales.v_tiles.index(used % S.slots).reshape([W, OWN]).load(BY_KEY)
        k_scale = gl.expand_dims(k_scale, 2)
        v_scale = gl.expand_dims(v_scale, 2)
        words = v_ring.tile(used)._reinterpret(gl.int32, [N, D // 4], WORDS)
        words = words.reshape([W, OWN, D // 4]).permute((0, 2, 1)).load(V_OPERAND)
        s = mma_v2(_to_biased_fp16(k), q, bias)
        s = s * (k_scale * unit)
        if S.has_softcap:
            twice = 2.0 * _LOG2_E / call.cap
            s = call.cap - 2.0 * call.cap / (1.0 + gl.exp2(s * twice))
        if S.has_alibi:
            s -= slope * gl.abs(position - at).to(gl.float32)
        v_scale = gl.where(v_scale < _LEAST_SCALE, _LEAST_SCALE, v_scale)
        s += _log2(v_scale)
        seen = at <= last
        if S.has_left:
            seen = seen & (at >= position - call.window_left)
        s = gl.where(seen, s, _NOTHING)
        top = gl.maximum(m, gl.max(s, 1))
        # A row that has seen no key yet: 0 makes every exponential 0, not NaN.
        finite = gl.where(top == _NOTHING, 0.0, top)
        p = gl.exp2(s - gl.expand_dims(finite, 1))
        alpha = gl.expand_dims(gl.exp2(m - finite), 1)
        m = top
        # A weight of 0 times NaN, of a token that is hidden, would be NaN.
        inverse = gl.where(v_scale == v_scale, _inverse(v_scale), 0.0)
        l = l * alpha + p * inverse
        weights = gl.convert_layout(p.to(gl.float16), P_OPERAND)
        # TMA may overtake reads that are on their way: a barrier waits for none of them.
        fence_async_shared()
        k_ring.release(used)
        v0, v1, v2, v3 = _channels_to_fp16(words)
        acc0 = mma_v2(v0, weights, acc0 * alpha)
        acc1 = mma_v2(v1, weights, acc1 * alpha)
        acc2 = mma_v2(v2, weights, acc2 * alpha)
        acc3 = mma_v2(v3, weights, acc3 * alpha)
        used += 1
    acc, m, l = _sum_of_warps(sums, acc0, acc1, acc2, acc3, m, gl.sum(l, 1))
    return acc, m, l, used


@gluon.jit
def _of_rows(x):
    return gl.expand_dims(gl.expand_dims(x, 0), 0)


@gluon.jit
def _sum_of_warps(sums, acc0, acc1, acc2, acc3, m, l):
    """(f32[D, R], largest score [R], sum of weights [R]). acc0 to acc3: every fourth channel,
    [warps, D // 4, R]."""
    outs0, outs1, outs2, outs3, tops, weights = sums
    W: gl.constexpr = _WARPS
    OWN: gl.constexpr = outs0.shape[0] // W  # rows of a warp
    R: gl.constexpr = outs0.shape[1]
    L: gl.constexpr = gl.BlockedLayout([1, 2], [8, 4], [4, 1], [1, 0])
    OUT: gl.constexpr = gl.BlockedLayout([4, 2], [8, 4], [4, 1], [1, 0])
    COLUMN: gl.constexpr = gl.SliceLayout(0, OUT)
    outs0.store(acc0.reshape([W * OWN, R]))
    outs1.store(acc1.reshape([W * OWN, R]))
    outs2.store(acc2.reshape([W * OWN, R]))
    outs3.store(acc3.reshape([W * OWN, R]))
    tops.store(m)
    weights.store(l)
    top = tops.slice(0, 1).load(L)
    for warp in gl.static_range(1, W):
        top = gl.maximum(top, tops.slice(warp, 1).load(L))
    finite = gl.where(top == _NOTHING, 0.0, top)
    l = gl.zeros([1, R], gl.float32, L)
    acc0 = gl.zeros([OWN, R], gl.float32, L)
    acc1 = acc0
    acc2 = acc0
    acc3 = acc0
    for warp in gl.static_range(W):
        alpha = gl.exp2(tops.slice(warp, 1).load(L) - finite)
        l += alpha * weights.slice(warp, 1).load(L)
        acc0 += alpha * outs0.slice(warp * OWN, OWN).load(L)
        acc1 += alpha * outs1.slice(warp * OWN, OWN).load(L)
        acc2 += alpha * outs2.slice(warp * OWN, OWN).load(L)
        acc3 += alpha * outs3.slice(warp * OWN, OWN).load(L)
    acc = gl.join(gl.join(acc0, acc2), gl.join(acc1, acc3)).permute((0, 2, 3, 1))
    acc = gl.convert_layout(acc.reshape([4 * OWN, R]), OUT)
    return acc, gl.convert_layout(gl.sum(top, 0), COLUMN), gl.convert_layout(gl.sum(l, 0), COLUMN)


@gluon.jit
def _load_queries(start, q_len, kv_head, exists, call):
    """[warps, block_d, rows]: the same for each warp."""
    S: gl.constexpr = call.S
    R: gl.constexpr = columns(S.most_rows)
    ROWS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, _Q_OPERAND))
    token, member, used = rows_of(q_len, call, R, ROWS)
    d = gl.arange(0, S.block_d, layout=gl.SliceLayout(0, gl.SliceLayout(2, _Q_OPERAND)))
    d = gl.expand_dims(gl.expand_dims(d, 0), 2)
    warp = gl.arange(0, _WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, _Q_OPERAND)))
    warp = gl.expand_dims(gl.expand_dims(warp, 1), 2)
    ptr = call.q_ptr + (kv_head * S.group + member).to(gl.int64) * call.q_stride_head
    ptr += (start + token).to(gl.int64) * call.q_stride_token
    mask = _of_rows(used & exists) & (d < S.head_dim) & (warp >= 0)
    return gl.load(_of_rows(ptr) + d + warp * 0, mask=mask, other=0.0)


@gluon.jit
def _to_fp16(q):
    """(fp16, f32[warps, rows]): their product. The second is a power of two, so that no bf16 query
    is too large for fp16."""
    q = q.to(gl.float32)
    exponent = gl.max(q.to(gl.int32, bitcast=True) & 0x7F800000, 1)
    # One of which the inverse is a normal number too.
    exponent = gl.minimum(gl.maximum(exponent, 1 << 23), 253 << 23)
    inverse = ((254 << 23) - exponent).to(gl.float32, bitcast=True)
    q = (q * gl.expand_dims(inverse, 1)).to(gl.float16)
    return q, exponent.to(gl.float32, bitcast=True)
