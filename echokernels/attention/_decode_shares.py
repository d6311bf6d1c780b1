"""Decode by equal shares, in portable Triton.

A program has one share of the key tiles of all sequences (`_shares.py`) for one KV head and one
tile of rows. Of a sequence that lies within its share it writes the output; of another a piece,
in fp32 with its LSE. A share has at most two: the end of a sequence that began before, and the
beginning of one that goes on. So the workspace depends on the number of programs alone. The last
program to write a piece of a sequence merges them all.
"""

import triton
import triton.language as tl

from echokernels._pdl import let_next_start, wait_for_previous
from echokernels.attention._shares import (
    cut,
    cuts_within,
    first_key,
    holder,
    line_up,
    next_without_keys,
    tiles_of,
)
from echokernels.attention._softmax import LN_2, LOG2_E
from echokernels.attention._split_k import query_range
from echokernels.attention._tile import attend_tile, rows_of, store_tile


@triton.jit
def _piece(share, is_end, kv_head, tile, kv_heads, num_tiles):
    """The place of a piece among all; is_end: of a sequence that began before the share."""
    return ((share * 2 + is_end).to(tl.int64) * kv_heads + kv_head) * num_tiles + tile


# Index tensors may be slices at any offset of larger buffers: their alignment varies at run time.
@triton.jit(
    do_not_specialize=[
        "block_table_ptr", "seqused_k_ptr", "cu_seqlens_q_ptr", "alibi_ptr", "sinks_ptr",
        "num_seqs", "num_tiles", "most_shares", "window_left", "window_right",
        "table_stride", "alibi_stride", "lse_stride_head",
    ]
)  # fmt: skip
def decode_shares_kernel(
    out_ptr,  # [num_tokens, heads, HEAD_DIM]
    lse_ptr,  # f32[heads, num_tokens], or None
    piece_out_ptr,  # f32[shares, 2, kv_heads, num_tiles, ROWS, HEAD_DIM]
    piece_lse_ptr,  # f32[shares, 2, kv_heads, num_tiles, ROWS], natural logarithm
    counter_ptr,  # i32[shares, kv_heads, num_tiles], zeros
    q_ptr,  # [num_tokens, heads, HEAD_DIM]
    k_ptr,  # [num_pages, PAGE_SIZE, kv_heads, HEAD_DIM]
    v_ptr,
    block_table_ptr,  # [num_seqs, max_pages]
    seqused_k_ptr,  # [num_seqs]
    cu_seqlens_q_ptr,  # [num_seqs + 1], or None: one query each
    alibi_ptr,  # f32[heads] or f32[num_seqs, heads], or None
    sinks_ptr,  # [heads], or None
    num_seqs,
    num_tiles,
    kv_heads,
    most_shares,
    out_stride_token,
    out_stride_head,
    lse_stride_head,
    lse_stride_token,
    q_stride_token,
    q_stride_head,
    k_stride_page,
    k_stride_slot,
    k_stride_head,
    v_stride_page,
    v_stride_slot,
    v_stride_head,
    table_stride,
    alibi_stride,
    scale,
    softcap,
    window_left,
    window_right,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    ROWS: tl.constexpr,  # of a tile that may hold a query
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    # KV heads are neighbours: their keys lie side by side in a page.
    pid = tl.program_id(0)
    kv_head = (pid % kv_heads).to(tl.int64)
    tile = pid // kv_heads % num_tiles
    share = pid // kv_heads // num_tiles
    tiles = tiles_of(
        seqused_k_ptr, cu_seqlens_q_ptr, num_seqs, window_left, HAS_LEFT, BLOCK_N, BLOCK_SEQS
    )
    total, size, larger, near = line_up(tiles, most_shares)
    end = tl.cumsum(tiles, axis=0)
    at = cut(share, end, total, size, larger, near)
    stop = cut(share + 1, end, total, size, larger, near)
    let_next_start(PDL)
    empty = next_without_keys(-1, tiles, num_seqs, share, most_shares)
    head = kv_head * GROUP
    while (at < stop) | (empty < num_seqs):
        seq, first, last = holder(at, end)
        is_empty = at >= stop
        if is_empty:
            seq = empty
            first = at
            last = at
            empty = next_without_keys(empty, tiles, num_seqs, share, most_shares)
        last_of_piece = tl.maximum(tl.minimum(last, stop), at)
        seq = seq.to(tl.int64)
        q_start, q_len = query_range(seq, cu_seqlens_q_ptr)
        if tile * BLOCK_M < q_len * GROUP:
            k_len = tl.load(seqused_k_ptr + seq).to(tl.int32)
            key = first_key(q_len, k_len, window_left, HAS_LEFT, BLOCK_N)
            alibi = alibi_ptr
            if alibi_ptr is not None:
                alibi += seq * alibi_stride + head
            out, lse = attend_tile(
                tile,
                q_ptr + q_start * q_stride_token + head * q_stride_head,
                q_stride_token, q_stride_head, q_len,
                k_ptr + kv_head * k_stride_head, k_stride_page, k_stride_slot,
                v_ptr + kv_head * v_stride_head, v_stride_page, v_stride_slot,
                0, block_table_ptr + seq * table_stride, k_len,
                key + (at - first) * BLOCK_N,
                tl.minimum(k_len, key + (last_of_piece - first) * BLOCK_N),
                alibi, None,
                scale, softcap, window_left, window_right, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP,
                PAGE_SIZE, GROUP, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, UPCAST,
            )  # fmt: skip
            if (at == first) & (last_of_piece == last):
                if sinks_ptr is not None:
                    _, head_of_group, _ = rows_of(tile, q_len, GROUP, BLOCK_M)
                    sink = tl.load(sinks_ptr + head + head_of_group).to(tl.float32)
                    out, lse = _with_sink(out, lse, sink)
                own_lse = lse_ptr
                if lse_ptr is not None:
                    own_lse += head * lse_stride_head + q_start * lse_stride_token
                store_tile(
                    tile, out, lse,
                    out_ptr + q_start * out_stride_token + head * out_stride_head,
                    out_stride_token, out_stride_head,
                    own_lse, lse_stride_token, lse_stride_head, q_len, GROUP, HEAD_DIM, BLOCK_D,
                    BLOCK_M,
                )  # fmt: skip
            else:
                is_end = (at > first).to(tl.int32)
                row = tl.arange(0, BLOCK_M)
                place = _piece(share, is_end, kv_head, tile, kv_heads, num_tiles) * ROWS + row
                d = tl.arange(0, BLOCK_D)[None, :]
                used = row < ROWS
                tl.store(
                    piece_out_ptr + place[:, None] * HEAD_DIM + d,
                    out,
                    mask=used[:, None] & (d < HEAD_DIM),
                )
                tl.store(piece_lse_ptr + place, lse, mask=used)
                low, high = cuts_within(first, last, size, larger, near)
                counter = counter_ptr + ((low - 1) * kv_heads + kv_head) * num_tiles + tile
                tl.debug_barrier()
                before = tl.atomic_add(counter, 1, sem="acq_rel")
                if before == high - low + 1:
                    tl.store(counter, 0)
                    own_lse = lse_ptr
                    if lse_ptr is not None:
                        own_lse += head * lse_stride_head + q_start * lse_stride_token
                    sinks = sinks_ptr
                    if sinks_ptr is not None:
                        sinks += head
                    _merge_rows(
                        out_ptr + q_start * out_stride_token + head * out_stride_head,
                        out_stride_token, out_stride_head,
                        own_lse, lse_stride_token, lse_stride_head,
                        piece_out_ptr, piece_lse_ptr, sinks,
                        low, high - low + 2, kv_head, tile, kv_heads, num_tiles, q_len,
                        GROUP, HEAD_DIM, BLOCK_D, BLOCK_M, ROWS,
                    )  # fmt: skip
        at = last_of_piece


@triton.jit
def _merge_rows(
    out_ptr,  # at the sequence and the KV head's first query head, as lse_ptr
    out_stride_token,
    out_stride_head,
    lse_ptr,
    lse_stride_token,
    lse_stride_head,
    piece_out_ptr,
    piece_lse_ptr,
    sinks_ptr,
    low,
    num_pieces,
    kv_head,
    tile,
    kv_heads,
    num_tiles,
    q_len,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Merges the pieces of a tile's rows. Other programs wrote them: the L1 cache is passed by."""
    BLOCK_R: tl.constexpr = triton.next_power_of_2(ROWS)
    BLOCK_S: tl.constexpr = max(4096 // (BLOCK_R * BLOCK_D), 1)  # pieces read at a time
    row = tl.arange(0, BLOCK_R)
    token = (tile * BLOCK_M + row) // GROUP
    head = (tile * BLOCK_M + row) % GROUP
    used = (row < ROWS) & (token < q_len)
    d = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    m = tl.full([BLOCK_R], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_R], tl.float32)
    if sinks_ptr is not None:
        m = tl.load(sinks_ptr + head).to(tl.float32)
        l = tl.where(m == float("-inf"), 0.0, 1.0)
    for start in range(0, num_pieces, BLOCK_S):
        piece = start + tl.arange(0, BLOCK_S)
        place = _piece(
            low - 1 + piece, (piece > 0).to(tl.int32), kv_head, tile, kv_heads, num_tiles
        )[:, None] * ROWS + row[None, :]  # fmt: skip
        mask = (piece < num_pieces)[:, None] & used[None, :]
        lse = tl.load(piece_lse_ptr + place, mask=mask, other=float("-inf"), cache_modifier=".cg")
        out = tl.load(
            piece_out_ptr + place[:, :, None] * HEAD_DIM + d[None, None, :],
            mask=mask[:, :, None] & (d < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        m_new = tl.maximum(m, tl.max(lse, axis=0))
        # All pieces so far are empty while m is -inf; 0 in its place makes every weight 0, not NaN.
        safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        weight = tl.exp2((lse - safe[None, :]) * LOG2_E)
        alpha = tl.exp2((m - safe) * LOG2_E)
        acc = acc * alpha[:, None] + tl.sum(out * weight[:, :, None], axis=0)
        l = l * alpha + tl.sum(weight, axis=0)
        m = m_new
    empty = l == 0.0
    safe_l = tl.where(empty, 1.0, l)
    rows = out_ptr + token.to(tl.int64) * out_stride_token + head * out_stride_head
    tl.store(
        rows[:, None] + d[None, :],
        (acc / safe_l[:, None]).to(out_ptr.dtype.element_ty),
        mask=used[:, None] & (d < HEAD_DIM)[None, :],
    )
    if lse_ptr is not None:
        lse = tl.where(empty, float("-inf"), m + tl.log2(safe_l) * LN_2)
        tl.store(lse_ptr + token * lse_stride_token + head * lse_stride_head, lse, mask=used)


@triton.jit
def _with_sink(out, lse, sink):
    """With one more score, which has no value."""
    top = tl.maximum(lse, sink)
    safe = tl.where(top == float("-inf"), 0.0, top)
    own = tl.exp2((lse - safe) * LOG2_E)
    total = own + tl.exp2((sink - safe) * LOG2_E)
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    out = out * (own / total)[:, None]
    return out, tl.where(empty, float("-inf"), safe + tl.log2(total) * LN_2)
