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

Of a cache of codes (INT8, FP8) key j is k_scale[j] * codes, so k_scale multiplies the scores of a
key, and no element of it. v_scale[j] would multiply the weights; but these may then be too small
for the product's operands. So log2(v_scale) is added to the scores before the max is taken: weights
are relative to the largest weight times scale, multiply codes as they are, and the denominator adds
weight / v_scale in fp32.
"""

import triton
import triton.language as tl

from echokernels.quant._row import LEAST_SCALE

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
def operand(x, DTYPE: tl.constexpr, UPCAST: tl.constexpr):
    """Keys or values, or codes of them, as `dot` takes them."""
    return x.to(tl.float32 if UPCAST else DTYPE)


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
def online_softmax_of_codes(s, m, l, v_scale):
    """The same where values are v_scale * codes and s has log2(v_scale) in it: weights are those of
    the codes."""
    m_new = tl.maximum(m, tl.max(s, axis=1))
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s - m_safe[:, None])
    alpha = tl.exp2(m - m_safe)
    # A weight of 0 times NaN, of a token that is hidden, would be NaN.
    inverse = tl.where(v_scale == v_scale, 1.0 / v_scale, 0.0)
    return p, alpha, m_new, l * alpha + tl.sum(p * inverse[None, :], axis=1)


@triton.jit
def load_scale(scale_ptr, page, stride_page, slot, stride_slot, mask, MASKED: tl.constexpr):
    """f32 of each key; 1 of those masked out."""
    ptr = scale_ptr + page * stride_page + slot * stride_slot
    return tl.load(ptr, mask=mask, other=1.0) if MASKED else tl.load(ptr)


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
    k_scale_ptr,  # f32 at the KV head, of a cache of codes; or None
    k_scale_stride_page,
    k_scale_stride_slot,
    v_scale_ptr,
    v_scale_stride_page,
    v_scale_stride_slot,
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

        s = dot(q, tl.trans(operand(k, q.dtype, UPCAST)), UPCAST)
        if k_scale_ptr is not None:
            k_scale = load_scale(
                k_scale_ptr, page, k_scale_stride_page, slot, k_scale_stride_slot, in_range, MASKED
            )
            s *= k_scale[None, :]
        if HAS_SOFTCAP:
            s = soft_cap(s * scale, softcap) * LOG2_E
        elif slope is not None:
            s *= scale * LOG2_E
        if slope is not None:
            s -= slope[:, None] * tl.abs(position[:, None] - n[None, :])
        # What softcap or ALiBi has changed is scaled already.
        BIASED: tl.constexpr = HAS_SOFTCAP or slope is not None
        factor = 1.0 if BIASED else scale * LOG2_E
        if v_scale_ptr is not None:
            v_scale = load_scale(
                v_scale_ptr, page, v_scale_stride_page, slot, v_scale_stride_slot, in_range, MASKED
            )
            # What is less, as a writer's 0 for a row of zeros, has no logarithm to speak of.
            v_scale = tl.where(v_scale < LEAST_SCALE, LEAST_SCALE, v_scale)
            s = s * factor + tl.log2(v_scale)[None, :]
        if MASKED:
            visible = in_range[None, :]
            if HAS_LEFT:
                visible &= n[None, :] >= position[:, None] - window_left
            if HAS_RIGHT:
                visible &= n[None, :] <= position[:, None] + window_right
            s = tl.where(visible, s, float("-inf"))
        if v_scale_ptr is not None:
            p, alpha, m, l = online_softmax_of_codes(s, m, l, v_scale)
        else:
            p, alpha, m, l = online_softmax(s, m, l, factor)
        acc = acc * alpha[:, None] + dot(p.to(q.dtype), operand(v, q.dtype, UPCAST), UPCAST)
    return acc, m, l


@triton.jit
def finish(acc, m, l):
    """(output, natural-log LSE) of each row; 0 and -inf where nothing was visible."""
    empty = l == 0.0
    out = acc / tl.where(empty, 1.0, l)[:, None]
    lse = tl.where(empty, float("-inf"), (m + tl.log2(tl.where(empty, 1.0, l))) * LN_2)
    return out, lse


@triton.jit
def with_sink(out, lse, sink):
    """(output, LSE) with one more score of each row, which has no value."""
    top = tl.maximum(lse, sink)
    safe = tl.where(top == float("-inf"), 0.0, top)
    own = tl.exp2((lse - safe) * LOG2_E)
    total = own + tl.exp2((sink - safe) * LOG2_E)
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    out = out * (own / total)[:, None]
    return out, tl.where(empty, float("-inf"), safe + tl.log2(total) * LN_2)
