"""Pieces of sequences that equal shares cut up, in portable Triton: stored, counted, merged.

A program works on one tile of rows of one KV head, `own_rows` of `all_rows`. A share has two pieces
of each at most: of a sequence that began before (is_end), and of one that goes on behind it.
"""

import triton
import triton.language as tl

from echokernels.attention._softmax import LN_2, LOG2_E, with_sink

# Pieces that one program merges before others go on, and those that one program merges alone: a
# group costs a store and a count.
_GROUP = tl.constexpr(16)
_MOST_UNGROUPED = tl.constexpr(32)


@triton.jit
def _rows_of_piece(share, is_end, all_rows, own_rows, row, ROWS: tl.constexpr):
    return ((share * 2 + is_end).to(tl.int64) * all_rows + own_rows) * ROWS + row


@triton.jit
def store_piece(
    piece_out_ptr,
    piece_lse_ptr,
    share,
    is_end,
    all_rows,
    own_rows,
    out,  # f32[BLOCK_R, BLOCK_D], normalised
    lse,  # f32[BLOCK_R], natural logarithm
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    row = tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)[None, :]
    at = _rows_of_piece(share, is_end, all_rows, own_rows, row, ROWS)
    used = row < ROWS
    tl.store(piece_out_ptr + at[:, None] * HEAD_DIM + d, out, mask=used[:, None] & (d < HEAD_DIM))
    tl.store(piece_lse_ptr + at, lse, mask=used)


@triton.jit
def merge_when_last(
    counter_ptr,
    piece_out_ptr,
    piece_lse_ptr,
    share,
    first,
    count,
    all_rows,
    own_rows,
    out_ptr,  # at the sequence and the KV head's first query head, as lse_ptr and sinks_ptr
    out_stride_token,
    out_stride_head,
    lse_ptr,
    lse_stride_token,
    lse_stride_head,
    sinks_ptr,
    tile,
    q_len,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Counts a piece of a sequence that was written, one of `count` from share `first` on. The
    program that counts the last one merges them all. Of many, it merges those of its group, and the
    last of these programs what they left."""
    BLOCK_R: tl.constexpr = triton.next_power_of_2(ROWS)
    stride = 1
    while count > 0:
        is_grouped = (stride == 1) & (count > _MOST_UNGROUPED)
        begin = count * 0
        members = count
        place = first
        if is_grouped:
            begin = (share - first) // _GROUP * _GROUP
            members = tl.minimum(count - begin, _GROUP)
            # A share that has nothing but keys of this sequence, so the counter is no other's.
            place = first + tl.maximum(begin - 1, 1)
        counter = counter_ptr + place * all_rows + own_rows
        tl.debug_barrier()
        before = tl.atomic_add(counter, 1, sem="acq_rel")
        if before == members - 1:
            tl.store(counter, 0)
            out, lse = _merge(
                piece_out_ptr, piece_lse_ptr, first, begin, members, stride, all_rows, own_rows,
                HEAD_DIM, BLOCK_D, BLOCK_R, ROWS,
            )  # fmt: skip
            if is_grouped:
                # Every thread has read: the first piece gives way.
                tl.debug_barrier()
                store_piece(
                    piece_out_ptr, piece_lse_ptr, first + begin, (begin > 0).to(tl.int32),
                    all_rows, own_rows, out, lse, ROWS, HEAD_DIM, BLOCK_D, BLOCK_R,
                )  # fmt: skip
                stride = stride * _GROUP
                count = tl.cdiv(count, _GROUP)
            else:
                _store_rows(
                    out_ptr, out_stride_token, out_stride_head, lse_ptr, lse_stride_token,
                    lse_stride_head, sinks_ptr, tile * BLOCK_M, q_len, out, lse, GROUP, HEAD_DIM,
                    BLOCK_D, BLOCK_R, ROWS,
                )  # fmt: skip
                count = 0
        else:
            count = 0


@triton.jit
def _merge(
    piece_out_ptr,
    piece_lse_ptr,
    first,
    start,
    count,
    stride,
    all_rows,
    own_rows,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ROWS: tl.constexpr,
):
    """(output f32[BLOCK_R, BLOCK_D], LSE) of `count` pieces of a sequence that begins in share
    `first`, every stride-th from number `start` on. Other programs wrote them: the L1 cache is
    passed by."""
    TOGETHER: tl.constexpr = max(min(4096 // (BLOCK_R * BLOCK_D), 8), 1)  # on their way at once
    row = tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)[None, :]
    acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    m = tl.full([BLOCK_R], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_R], tl.float32)
    for begin in range(0, count, TOGETHER):
        for i in tl.static_range(TOGETHER):
            number = start + (begin + i) * stride
            at = _rows_of_piece(
                first + number, (number > 0).to(tl.int32), all_rows, own_rows, row, ROWS
            )
            mask = (row < ROWS) & (begin + i < count)
            lse = tl.load(piece_lse_ptr + at, mask=mask, other=float("-inf"), cache_modifier=".cg")
            out = tl.load(
                piece_out_ptr + at[:, None] * HEAD_DIM + d,
                mask=mask[:, None] & (d < HEAD_DIM),
                other=0.0,
                cache_modifier=".cg",
            )
            m_new = tl.maximum(m, lse)
            # All pieces so far are empty while m is -inf: 0 in its place makes weights 0, not NaN.
            safe = tl.where(m_new == float("-inf"), 0.0, m_new)
            weight = tl.exp2((lse - safe) * LOG2_E)
            alpha = tl.exp2((m - safe) * LOG2_E)
            acc = acc * alpha[:, None] + out * weight[:, None]
            l = l * alpha + weight
            m = m_new
    empty = l == 0.0
    safe_l = tl.where(empty, 1.0, l)
    lse = tl.where(empty, float("-inf"), m + tl.log2(safe_l) * LN_2)
    return acc / safe_l[:, None], lse


@triton.jit
def _store_rows(
    out_ptr,
    out_stride_token,
    out_stride_head,
    lse_ptr,
    lse_stride_token,
    lse_stride_head,
    sinks_ptr,
    first_row,
    q_len,
    out,
    lse,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)[None, :]
    token = (first_row + row) // GROUP
    head = (first_row + row) % GROUP
    used = (row < ROWS) & (token < q_len)
    if sinks_ptr is not None:
        out, lse = with_sink(out, lse, tl.load(sinks_ptr + head).to(tl.float32))
    rows = out_ptr + token.to(tl.int64) * out_stride_token + head * out_stride_head
    tl.store(
        rows[:, None] + d,
        out.to(out_ptr.dtype.element_ty),
        mask=used[:, None] & (d < HEAD_DIM),
    )
    if lse_ptr is not None:
        tl.store(lse_ptr + token * lse_stride_token + head * lse_stride_head, lse, mask=used)
