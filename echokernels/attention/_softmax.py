"""Keys and the online softmax: where keys lie, which are visible, how scores become weights.

Scores are kept in base 2 (multiplied by log2 e), because exp2 is the instruction the hardware has.
The online softmax is that of Milakov and Gimelshein (2018) as used by FlashAttention-2 (Dao, 2023):
a running max `m`, a running sum `l`, and an accumulator that is rescaled when the max grows and
divided by `l` once, at the end.

The query at token t of a sequence with q_len queries and k_len keys stands at position
p = t + k_len - q_len (bottom-right alignment) and sees key j if p - window_left <= j <= p +
window_right. Causal attention is window_right = 0.

A score is scaled, then capped (softcap), then lowered by slope * |p - j| (ALiBi; Press et al.,
2022), then masked. A sink (Xiao et al., 2024; a learned logit for each head, as in gpt-oss) is one
more score of each row that has no value: it adds to the denominator, and so to the LSE.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def dot(a, b, UPCAST: tl.constexpr):
    """a @ b in fp32, exact for fp32 operands (no TF32).

    UPCAST is for the interpreter, which cannot multiply bf16.
    """
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def soft_cap(s, cap):
    """cap * tanh(s / cap), by a sigmoid whose exponential may overflow to infinity without harm."""
    return cap * (2.0 / (1.0 + tl.exp(-2.0 * (s / cap))) - 1.0)


@triton.jit
def key_range(
    first_token,  # of the tile
    last_token,
    shift,  # k_len - q_len
    k_len,
    window_left,
    window_right,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):
    """(begin, end, full_end): at least one row of the tile sees each key in [begin, end).

    Every row sees the keys below full_end, unless a left window hides them.
    """
    begin = 0
    end = k_len
    full_end = k_len
    if HAS_LEFT:
        begin = tl.maximum(0, first_token + shift - window_left)
    if HAS_RIGHT:
        end = tl.minimum(k_len, last_token + shift + window_right + 1)
        full_end = tl.minimum(k_len, first_token + shift + window_right + 1)
    return begin, end, full_end


@triton.jit
def key_location(n, mask, first_row, table_ptr, PAGE_SIZE: tl.constexpr):
    """(page, slot) of keys n of a sequence. Contiguous keys (PAGE_SIZE 0) are slots of one page."""
    if PAGE_SIZE == 0:
        page = tl.zeros_like(n).to(tl.int64)
        slot = first_row + n
    else:
        page = tl.load(table_ptr + n // PAGE_SIZE, mask=mask, other=0).to(tl.int64)
        slot = (n % PAGE_SIZE).to(tl.int64)
    return page, slot


@triton.jit
def online_softmax(s, m, l, scale):
    """One step: (weights of s, factor for what was accumulated before, new max, new sum).

    Weights are 2^(s * scale - max), scale > 0: one instruction before the exponential.
    """
    m_new = tl.maximum(m, tl.max(s, axis=1) * scale)
    # A row that has seen no key yet keeps m = -inf; 0 in its place makes every exponential 0, not
    # NaN.
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s * scale - m_safe[:, None])
    alpha = tl.exp2(m - m_safe)
    return p, alpha, m_new, l * alpha + tl.sum(p, axis=1)


@triton.jit
def initial(sinks_ptr, head, BLOCK_M: tl.constexpr):
    """(m, l) before the first key: those of the sink of each row's head, if there are sinks."""
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    if sinks_ptr is not None:
        m = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
        l = tl.where(m == float("-inf"), 0.0, 1.0)
    return m, l


@triton.jit
def attend(
    acc,  # f32[BLOCK_M, BLOCK_D]
    m,  # f32[BLOCK_M]
    l,  # f32[BLOCK_M]
    q,  # [BLOCK_M, BLOCK_D]
    begin,  # first key, a multiple of BLOCK_N from which whole tiles are taken
    end,
    k_len,
    position,  # i32[BLOCK_M]: k-aligned position of each row's query
    slope,  # f32[BLOCK_M] in base 2, or None: no ALiBi
    k_ptr,  # at the KV head
    v_ptr,
    k_stride_page,
    k_stride_slot,
    v_stride_page,
    v_stride_slot,
    first_row,
    table_ptr,
    scale,  # > 0
    softcap,
    window_left,
    window_right,
    MASKED: tl.constexpr,  # some key of some tile may be hidden or beyond the end
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Attends to keys [begin, end) and returns the new (acc, m, l)."""
    d = tl.arange(0, BLOCK_D)[None, :]
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        in_range = n < tl.minimum(end, k_len)
        page, slot = key_location(n, in_range, first_row, table_ptr, PAGE_SIZE)
        k_rows = k_ptr + (page * k_stride_page + slot * k_stride_slot)[:, None]
        v_rows = v_ptr + (page * v_stride_page + slot * v_stride_slot)[:, None]
        if MASKED:
            # Values beyond the end are loaded as 0: NaN in unused memory times a weight of 0 would
            # be NaN.
            load_mask = in_range[:, None] & (d < HEAD_DIM)
            k = tl.load(k_rows + d, mask=load_mask, other=0.0)
            v = tl.load(v_rows + d, mask=load_mask, other=0.0)
        elif BLOCK_D == HEAD_DIM:
            k = tl.load(k_rows + d)
            v = tl.load(v_rows + d)
        else:
            k = tl.load(k_rows + d, mask=d < HEAD_DIM, other=0.0)
            v = tl.load(v_rows + d, mask=d < HEAD_DIM, other=0.0)

        s = dot(q, tl.trans(k), UPCAST)
        if HAS_SOFTCAP:
            s = soft_cap(s * scale, softcap) * LOG2_E
        elif slope is not None:
            s *= scale * LOG2_E
        if slope is not None:
            s -= slope[:, None] * tl.abs(position[:, None] - n[None, :])
        if MASKED:
            visible = in_range[None, :]
            if HAS_LEFT:
                visible &= n[None, :] >= position[:, None] - window_left
            if HAS_RIGHT:
                visible &= n[None, :] <= position[:, None] + window_right
            s = tl.where(visible, s, float("-inf"))
        # What softcap or ALiBi has changed is scaled already.
        BIASED: tl.constexpr = HAS_SOFTCAP or slope is not None
        p, alpha, m, l = online_softmax(s, m, l, 1.0 if BIASED else scale * LOG2_E)
        acc = acc * alpha[:, None] + dot(p.to(v.dtype), v, UPCAST)
    return acc, m, l


@triton.jit
def finish(acc, m, l):
    """(output, natural-log LSE) of each row; 0 and -inf where nothing was visible."""
    empty = l == 0.0
    out = acc / tl.where(empty, 1.0, l)[:, None]
    lse = tl.where(empty, float("-inf"), (m + tl.log2(tl.where(empty, 1.0, l))) * LN_2)
    return out, lse
