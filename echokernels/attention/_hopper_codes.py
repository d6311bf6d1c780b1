"""The consumer of the Hopper decode for INT8 caches: codes become operands in registers.

A code is worth two instructions at most, or converting takes longer than loading. So bytes go from
shared memory straight into the operand layout of mma.sync and become fp16 there, by permuting them
under an exponent: 0x6400 | (x ^ 0x80) is 1024 + 128 + x. The order of a contraction is free, so a
thread takes 16 consecutive bytes of a key, as it does of the query. Values are read as words of
four channels of one token: words of two tokens are permuted into pairs of tokens of one channel,
and four products give every fourth channel each. No byte is moved between threads.

Each warp attends to its own 16 keys of a tile, with its own running maximum: warps meet at the end
of a piece only. Scores are [keys, rows] and outputs [channels, rows], as with WGMMA, whose operands
would have to go back to shared memory.

log2(v_scale) joins the score before the maximum is taken, weights multiply codes as they are, and
the denominator adds weight / v_scale (see `_softmax.py`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from echokernels.attention._hopper_memory import accumulator_layout
from echokernels.attention._hopper_pieces import columns, rows_of

_LOG2_E = gl.constexpr(1.4426950408889634)
_NOTHING = gl.constexpr(float("-inf"))
# Of scores and weights, [keys, rows] of all warps; and of outputs, [warp, channels, rows].
_FLAT = gl.constexpr(
    gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8])
)
_BY_WARP = gl.constexpr(
    gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1, 1], instr_shape=[1, 16, 8])
)


@gluon.jit
def _to_fp16(x):
    """Of int8, four to a register."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 t, u;
        xor.b32 t, $2, 0x80808080;
        mov.b32 u, 0x64646464;
        prmt.b32 $0, t, u, 0x4140;
        prmt.b32 $1, t, u, 0x4342;
        mov.b32 u, 0x64806480;
        sub.f16x2 $0, $0, u;
        sub.f16x2 $1, $1, u;
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
def attend_to_codes(k_ring, v_ring, used, first, count, seq, start, kv_head, q_len, k_len, call):
    """(accumulator f32[block_d, rows], largest score, sum of weights [rows], used slots) after
    `count` tiles from the `first`."""
    S: gl.constexpr = call.S
    D: gl.constexpr = S.block_d
    N: gl.constexpr = S.block_n
    R: gl.constexpr = columns(S.most_rows)
    W: gl.constexpr = N // 16  # warps
    BY_ROW: gl.constexpr = gl.SliceLayout(0, _FLAT)
    BY_KEY: gl.constexpr = gl.SliceLayout(1, _FLAT)
    K_OPERAND: gl.constexpr = gl.DotOperandLayout(0, _FLAT, k_width=16)
    Q_OPERAND: gl.constexpr = gl.DotOperandLayout(1, _FLAT, k_width=16)
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
    q, unit = _load_queries(start, q_len, kv_head, call, R, Q_OPERAND)
    # A score in units of the products of codes and scaled queries.
    unit = gl.convert_layout(unit, BY_ROW)[None, :]

    key = gl.arange(0, N, layout=BY_KEY)
    m = gl.full([W, R], _NOTHING, gl.float32, gl.SliceLayout(1, _BY_WARP))
    l = gl.zeros([W, 16, R], gl.float32, _BY_WARP)
    zero = gl.zeros([N, R], gl.float32, _FLAT)
    acc0 = gl.zeros([W, D // 4, R], gl.float32, _BY_WARP)
    acc1 = gl.zeros([W, D // 4, R], gl.float32, _BY_WARP)
    acc2 = gl.zeros([W, D // 4, R], gl.float32, _BY_WARP)
    acc3 = gl.zeros([W, D // 4, R], gl.float32, _BY_WARP)
    table_ptr = call.table_ptr + seq.to(gl.int64) * call.table_stride
    at = first * N + key
    page = _page(table_ptr, at, k_len, S.page_size)
    k_scale, v_scale = _scales(page, at, k_len, kv_head, call)
    page = _page(table_ptr, at + N, k_len, S.page_size)
    for i in range(count):
        begin = (first + i) * N
        at = begin + key
        # Scales are on their way a tile ahead, and the table two.
        next_k_scale, next_v_scale = _scales(page, at + N, k_len, kv_head, call)
        page = _page(table_ptr, at + 2 * N, k_len, S.page_size)
        k_ring.wait_full(used)
        k = k_ring.tile(used).load(K_OPERAND)
        s = mma_v2(_to_fp16(k), q, zero)
        k_ring.release(used)
        s = s * k_scale[:, None] * unit
        if S.has_softcap:
            twice = 2.0 * _LOG2_E * call.scale / call.cap
            s = call.cap - 2.0 * call.cap / (1.0 + gl.exp2(s * twice))
        else:
            s = s * call.scale
        if S.has_alibi:
            s -= slope[None, :] * gl.abs(position[None, :] - at[:, None]).to(gl.float32)
        s += gl.log2(v_scale)[:, None]
        seen = at[:, None] <= last[None, :]
        if S.has_left:
            seen = seen & (at[:, None] >= (position - call.window_left)[None, :])
        s = gl.where(seen, s, _NOTHING)
        by_warp = gl.convert_layout(s.reshape([W, 16, R]), _BY_WARP, assert_trivial=True)
        top = gl.maximum(m, gl.max(by_warp, 1))
        finite = gl.where(top == _NOTHING, 0.0, top)
        p = gl.exp2(by_warp - gl.expand_dims(finite, 1))
        alpha = gl.exp2(m - finite)
        m = top
        # A weight of 0 times NaN, of a token that is hidden, would be NaN.
        inverse = gl.where(v_scale == v_scale, 1.0 / v_scale, 0.0)[:, None] + zero
        inverse = gl.convert_layout(inverse.reshape([W, 16, R]), _BY_WARP, assert_trivial=True)
        alpha = gl.expand_dims(alpha, 1)
        l = l * alpha + p * inverse
        weights = gl.convert_layout(p.to(gl.float16), P_OPERAND)
        v_ring.wait_full(used)
        words = v_ring.tile(used)._reinterpret(gl.int32, [N, D // 4], WORDS)
        words = words.reshape([W, 16, D // 4]).permute((0, 2, 1)).load(V_OPERAND)
        v_ring.release(used)
        v0, v1, v2, v3 = _channels_to_fp16(words)
        acc0 = mma_v2(v0, weights, acc0 * alpha)
        acc1 = mma_v2(v1, weights, acc1 * alpha)
        acc2 = mma_v2(v2, weights, acc2 * alpha)
        acc3 = mma_v2(v3, weights, acc3 * alpha)
        k_scale = next_k_scale
        v_scale = next_v_scale
        used += 1

    top = gl.max(m, 0)
    finite = gl.where(top == _NOTHING, 0.0, top)
    alpha = gl.expand_dims(gl.exp2(m - gl.expand_dims(finite, 0)), 1)
    l = gl.sum(gl.sum(l * alpha, 1), 0)
    # Channel 4 n + j of each word n.
    even = gl.join(gl.sum(acc0 * alpha, 0), gl.sum(acc2 * alpha, 0))
    odd = gl.join(gl.sum(acc1 * alpha, 0), gl.sum(acc3 * alpha, 0))
    acc = gl.join(even, odd).permute((0, 2, 3, 1)).reshape([D, R])
    L: gl.constexpr = accumulator_layout(R)
    COLUMN: gl.constexpr = gl.SliceLayout(0, L)
    return (
        gl.convert_layout(acc, L),
        gl.convert_layout(top, COLUMN),
        gl.convert_layout(l, COLUMN),
        used,
    )


@gluon.jit
def _load_queries(start, q_len, kv_head, call, R: gl.constexpr, layout: gl.constexpr):
    """(fp16[block_d, rows], f32[rows]): their product. The second is a power of two, so that no
    bf16 query is too large for fp16."""
    S: gl.constexpr = call.S
    token, member, exists = rows_of(q_len, call, R, gl.SliceLayout(0, layout))
    d = gl.arange(0, S.block_d, layout=gl.SliceLayout(1, layout))[:, None]
    ptr = call.q_ptr + (kv_head * S.group + member).to(gl.int64) * call.q_stride_head
    ptr += (start + token).to(gl.int64) * call.q_stride_token
    q = gl.load(ptr[None, :] + d, mask=exists[None, :] & (d < S.head_dim), other=0.0)
    q = q.to(gl.float32)
    exponent = gl.max(q.to(gl.int32, bitcast=True) & 0x7F800000, 0)
    # One of which the inverse is a normal number too.
    exponent = gl.minimum(gl.maximum(exponent, 1 << 23), 253 << 23)
    inverse = ((254 << 23) - exponent).to(gl.float32, bitcast=True)
    return (q * inverse[None, :]).to(gl.float16), exponent.to(gl.float32, bitcast=True)


@gluon.jit
def _page(table_ptr, at, k_len, PAGE_SIZE: gl.constexpr):
    return gl.load(table_ptr + at // PAGE_SIZE, mask=at < k_len, other=0)


@gluon.jit
def _scales(page, at, k_len, kv_head, call):
    """(k_scale, v_scale) of keys; ones of none."""
    S: gl.constexpr = call.S
    page = page.to(gl.int64)
    slot = (at % S.page_size).to(gl.int64)
    head = kv_head.to(gl.int64)
    exists = at < k_len
    k = page * call.k_scale_stride_page + slot * call.k_scale_stride_slot
    v = page * call.v_scale_stride_page + slot * call.v_scale_stride_slot
    k_ptr = call.k_scale_ptr + head * call.k_scale_stride_head
    v_ptr = call.v_scale_ptr + head * call.v_scale_stride_head
    return gl.load(k_ptr + k, mask=exists, other=1.0), gl.load(v_ptr + v, mask=exists, other=1.0)
