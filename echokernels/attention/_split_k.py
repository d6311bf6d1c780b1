"""Split-K on the device: which keys a split attends to, and the merging of its partial results.

Every kernel finds the chunks of a sequence from its own lengths with `chunks`, so the kernel that
writes partials and the one that merges them agree without a word from the host.
"""

import triton
import triton.language as tl

from echokernels.attention._softmax import LN_2, LOG2_E


@triton.jit
def query_range(seq, cu_seqlens_q_ptr):
    """(first token, number of query tokens) of a sequence; without boundaries every sequence has
    one."""
    if cu_seqlens_q_ptr is None:
        start = seq
        count = tl.full([], 1, tl.int32)
    else:
        start = tl.load(cu_seqlens_q_ptr + seq).to(tl.int64)
        count = (tl.load(cu_seqlens_q_ptr + seq + 1) - start).to(tl.int32)
    return start, count


@triton.jit
def chunks(
    q_len,
    k_len,
    split_divisor,
    min_chunk,
    window_left,
    HAS_LEFT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """(first visible key rounded down to a tile, keys per split): a function of the sequence's own
    lengths alone."""
    first = 0
    if HAS_LEFT:
        first = tl.maximum(0, k_len - q_len - window_left) // BLOCK_N * BLOCK_N
    chunk = tl.maximum(tl.cdiv(k_len - first, split_divisor), min_chunk)
    return first, tl.cdiv(chunk, BLOCK_N) * BLOCK_N


@triton.jit(
    do_not_specialize=[
        "seqused_k_ptr", "cu_seqlens_q_ptr", "sinks_ptr", "num_tokens", "max_seqlen_q",
        "split_divisor", "min_chunk", "window_left", "lse_stride_head",
    ]
)  # fmt: skip
def merge_splits_kernel(
    out_ptr,  # [num_tokens, heads, HEAD_DIM]
    lse_ptr,  # f32[heads, num_tokens], or None
    partial_out_ptr,  # f32[splits, num_tokens, heads, HEAD_DIM]
    partial_lse_ptr,  # f32[splits, num_tokens, heads]
    seqused_k_ptr,
    cu_seqlens_q_ptr,
    sinks_ptr,  # [heads], or None
    num_tokens,
    max_seqlen_q,
    heads,
    split_divisor,
    min_chunk,
    out_stride_token,
    out_stride_head,
    lse_stride_head,
    lse_stride_token,
    window_left,
    HAS_LEFT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,  # of the kernel that wrote the partials
    BLOCK_S: tl.constexpr,  # partials read at a time
):
    pid = tl.program_id(0).to(tl.int64)
    head = pid % heads
    query = pid // heads % max_seqlen_q
    seq = pid // heads // max_seqlen_q
    q_start, q_len = query_range(seq, cu_seqlens_q_ptr)
    if query >= q_len:
        return
    k_len = tl.load(seqused_k_ptr + seq).to(tl.int32)
    first_key, chunk = chunks(
        q_len, k_len, split_divisor, min_chunk, window_left, HAS_LEFT, BLOCK_N
    )
    num_splits = tl.cdiv(k_len - first_key, chunk)

    token = q_start + query
    d = tl.arange(0, BLOCK_D)[None, :]
    acc = tl.zeros([BLOCK_D], tl.float32)
    m = tl.full([], float("-inf"), tl.float32)
    l = tl.zeros([], tl.float32)
    if sinks_ptr is not None:
        m = tl.load(sinks_ptr + head).to(tl.float32)
        l = tl.where(m == float("-inf"), 0.0, 1.0)
    for start in range(0, num_splits, BLOCK_S):
        split_id = start + tl.arange(0, BLOCK_S)
        mask = split_id < num_splits
        index = (split_id.to(tl.int64) * num_tokens + token) * heads + head
        lse = tl.load(partial_lse_ptr + index, mask=mask, other=float("-inf"))
        partial = tl.load(
            partial_out_ptr + index[:, None] * HEAD_DIM + d,
            mask=mask[:, None] & (d < HEAD_DIM),
            other=0.0,
        )
        m_new = tl.maximum(m, tl.max(lse, axis=0))
        # All chunks so far are empty while m is -inf; 0 in its place makes every weight 0, not NaN.
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        weight = tl.exp2((lse - m_safe) * LOG2_E)
        alpha = tl.exp2((m - m_safe) * LOG2_E)
        acc = acc * alpha + tl.sum(partial * weight[:, None], axis=0)
        l = l * alpha + tl.sum(weight, axis=0)
        m = m_new

    empty = l == 0.0
    safe = tl.where(empty, 1.0, l)
    column = tl.arange(0, BLOCK_D)
    out_row = out_ptr + token * out_stride_token + head * out_stride_head
    tl.store(out_row + column, (acc / safe).to(out_ptr.dtype.element_ty), mask=column < HEAD_DIM)
    if lse_ptr is not None:
        # Of a single partial this is its own LSE, bit for bit: as if nothing had been split.
        lse = tl.where(empty, float("-inf"), m + tl.log2(safe) * LN_2)
        tl.store(lse_ptr + head * lse_stride_head + token * lse_stride_token, lse)
