"""A tile of rows from queries to results, shared by all attention kernels.

A tile holds BLOCK_M rows of one (sequence, KV head). Row r is query token r // GROUP and query head
r % GROUP of that KV head, so any group size fills the tile, and K and V are loaded once for the
whole group (GQA packing). Pointers to queries and results come positioned at the sequence's first
token and the KV head's first query head, those to slopes and sinks at that head.
"""

import triton
import triton.language as tl

from echokernels.attention._softmax import LOG2_E, attend, finish, key_range, with_sink


@triton.jit
def rows_of(tile, q_len, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """(token, head of the group, whether there is such a token) of each row."""
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token = row // GROUP
    return token.to(tl.int64), row % GROUP, token < q_len


@triton.jit
def attend_tile(
    tile,
    q_ptr,
    q_stride_token,
    q_stride_head,
    q_len,
    k_ptr,  # at the KV head
    k_stride_page,
    k_stride_slot,
    v_ptr,
    v_stride_page,
    v_stride_slot,
    k_scale_ptr,  # f32 at the KV head, of a cache of codes; or None
    k_scale_stride_page,
    k_scale_stride_slot,
    v_scale_ptr,
    v_scale_stride_page,
    v_scale_stride_slot,
    first_row,  # of the sequence in contiguous K and V
    table_ptr,  # the sequence's row of the block table
    k_len,
    share_begin,  # attend to keys [share_begin, share_end) only; the first is a multiple of BLOCK_N
    share_end,
    alibi_ptr,  # f32[GROUP], or None
    sinks_ptr,  # [GROUP], or None
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
    UPCAST: tl.constexpr,
):
    """(out f32[BLOCK_M, BLOCK_D], lse f32[BLOCK_M]) of the rows over their share of the keys."""
    token, head, row_mask = rows_of(tile, q_len, GROUP, BLOCK_M)
    d = tl.arange(0, BLOCK_D)[None, :]
    q_rows = q_ptr + (token * q_stride_token + head * q_stride_head)[:, None]
    q = tl.load(q_rows + d, mask=row_mask[:, None] & (d < HEAD_DIM), other=0.0)
    # The largest score is that of the largest product only if the scale is above 0.
    q = tl.where(scale < 0.0, -q, q)
    scale = tl.maximum(tl.abs(scale), 1e-37)

    shift = k_len - q_len
    first_token = tile * BLOCK_M // GROUP
    last_token = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, q_len - 1)
    begin, end, full_end = key_range(
        first_token, last_token, shift, k_len, window_left, window_right, HAS_LEFT, HAS_RIGHT
    )
    begin = tl.maximum(begin // BLOCK_N * BLOCK_N, share_begin)
    end = tl.minimum(end, share_end)
    # Whole tiles that every row sees need no mask; with a left window there are few: all get one.
    unmasked_end = begin
    if not HAS_LEFT:
        unmasked_end = tl.maximum(begin, tl.minimum(full_end // BLOCK_N * BLOCK_N, end))

    position = token.to(tl.int32) + shift
    slope = alibi_ptr
    if alibi_ptr is not None:
        slope = tl.load(alibi_ptr + head) * LOG2_E
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    for masked in tl.static_range(2):
        acc, m, l = attend(
            acc, m, l, q,
            unmasked_end if masked else begin,
            end if masked else unmasked_end,
            k_len, position, slope, k_ptr, v_ptr,
            k_stride_page, k_stride_slot, v_stride_page, v_stride_slot,
            k_scale_ptr, k_scale_stride_page, k_scale_stride_slot,
            v_scale_ptr, v_scale_stride_page, v_scale_stride_slot, first_row, table_ptr,
            scale, softcap, window_left, window_right,
            masked == 1, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, PAGE_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N,
            UPCAST,
        )  # fmt: skip
    out, lse = finish(acc, m, l)
    if sinks_ptr is not None:
        out, lse = with_sink(out, lse, tl.load(sinks_ptr + head).to(tl.float32))
    return out, lse


@triton.jit
def store_tile(
    tile,
    out,  # f32[BLOCK_M, BLOCK_D]
    lse,  # f32[BLOCK_M]
    out_ptr,
    out_stride_token,
    out_stride_head,
    lse_ptr,  # or None
    lse_stride_token,
    lse_stride_head,
    q_len,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    token, head, row_mask = rows_of(tile, q_len, GROUP, BLOCK_M)
    d = tl.arange(0, BLOCK_D)[None, :]
    out_rows = out_ptr + (token * out_stride_token + head * out_stride_head)[:, None]
    out_mask = row_mask[:, None] & (d < HEAD_DIM)
    tl.store(out_rows + d, out.to(out_ptr.dtype.element_ty), mask=out_mask)
    if lse_ptr is not None:
        lse_rows = lse_ptr + token * lse_stride_token + head * lse_stride_head
        tl.store(lse_rows, lse, mask=row_mask)
