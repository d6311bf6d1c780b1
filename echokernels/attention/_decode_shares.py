"""Decode by equal shares, in portable Triton.

A program has one share of the key tiles of all sequences (`_shares.py`) for one KV head and one
tile of rows. Of a sequence that lies within its share it writes the output; of another a piece,
in fp32 with its LSE. A share has at most two: the end of a sequence that began before, and the
beginning of one that goes on. So the workspace depends on the number of programs alone. The last
program to write a piece of a sequence merges them all.
"""

import torch
import triton
import triton.language as tl

from echokernels._launch import counter, launch
from echokernels._pdl import early_launch, let_next_start, wait_for_previous
from echokernels._target import INTERPRETED, Target
from echokernels._tuning import TileConfig
from echokernels.attention._arguments import alibi_stride, scale_strides
from echokernels.attention._decode_config import sharing
from echokernels.attention._pieces import merge_when_last, store_piece
from echokernels.attention._shares import (
    cut,
    cuts_within,
    first_key,
    holder,
    line_up,
    next_without_keys,
    tiles_of,
)
from echokernels.attention._softmax import with_sink
from echokernels.attention._split_k import query_range
from echokernels.attention._tile import attend_tile, rows_of, store_tile
from echokernels.attention.split import block_seqs, num_shares
from echokernels.attention.workspace import partials


# Index tensors may be slices at any offset of larger buffers: their alignment varies at run time.
@triton.jit(
    do_not_specialize=[
        "k_scale_ptr", "v_scale_ptr", "k_scale_stride_page", "k_scale_stride_slot",
        "k_scale_stride_head", "v_scale_stride_page", "v_scale_stride_slot", "v_scale_stride_head",
        "block_table_ptr", "seqused_k_ptr", "cu_seqlens_q_ptr", "alibi_ptr", "sinks_ptr",
        "num_seqs", "num_tiles", "most_shares", "window_left", "window_right",
        "table_stride", "alibi_stride", "lse_stride_head",
    ]
)  # fmt: skip
def decode_shares_kernel(
    out_ptr,  # [num_tokens, heads, HEAD_DIM]
    lse_ptr,  # f32[heads, num_tokens], or None
    piece_out_ptr,  # f32[shares, 2, num_tiles, kv_heads, ROWS, HEAD_DIM]
    piece_lse_ptr,  # f32[shares, 2, num_tiles, kv_heads, ROWS], natural logarithm
    counter_ptr,  # i32[shares, num_tiles, kv_heads], zeros
    q_ptr,  # [num_tokens, heads, HEAD_DIM]
    k_ptr,  # [num_pages, PAGE_SIZE, kv_heads, HEAD_DIM]
    v_ptr,
    block_table_ptr,  # [num_seqs, max_pages]
    seqused_k_ptr,  # [num_seqs]
    cu_seqlens_q_ptr,  # [num_seqs + 1], or None: one query each
    alibi_ptr,  # f32[heads] or f32[num_seqs, heads], or None
    sinks_ptr,  # [heads], or None
    k_scale_ptr,  # f32[num_pages, PAGE_SIZE, kv_heads] of a cache of codes, or None
    v_scale_ptr,
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
    k_scale_stride_page,
    k_scale_stride_slot,
    k_scale_stride_head,
    v_scale_stride_page,
    v_scale_stride_slot,
    v_scale_stride_head,
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
    all_rows = kv_heads * num_tiles
    own_rows = pid % all_rows
    own_sinks = sinks_ptr
    if sinks_ptr is not None:
        own_sinks += head
    if k_scale_ptr is not None:
        k_scale_ptr += kv_head * k_scale_stride_head
        v_scale_ptr += kv_head * v_scale_stride_head
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
                k_scale_ptr, k_scale_stride_page, k_scale_stride_slot,
                v_scale_ptr, v_scale_stride_page, v_scale_stride_slot,
                0, block_table_ptr + seq * table_stride, k_len,
                key + (at - first) * BLOCK_N,
                tl.minimum(k_len, key + (last_of_piece - first) * BLOCK_N),
                alibi, None,
                scale, softcap, window_left, window_right, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP,
                PAGE_SIZE, GROUP, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, UPCAST,
            )  # fmt: skip
            own_lse = lse_ptr
            if lse_ptr is not None:
                own_lse += head * lse_stride_head + q_start * lse_stride_token
            if (at == first) & (last_of_piece == last):
                if sinks_ptr is not None:
                    _, head_of_group, _ = rows_of(tile, q_len, GROUP, BLOCK_M)
                    sink = tl.load(own_sinks + head_of_group).to(tl.float32)
                    out, lse = with_sink(out, lse, sink)
                store_tile(
                    tile, out, lse,
                    out_ptr + q_start * out_stride_token + head * out_stride_head,
                    out_stride_token, out_stride_head,
                    own_lse, lse_stride_token, lse_stride_head, q_len, GROUP, HEAD_DIM, BLOCK_D,
                    BLOCK_M,
                )  # fmt: skip
            else:
                store_piece(
                    piece_out_ptr, piece_lse_ptr, share, (at > first).to(tl.int32), all_rows,
                    own_rows, out, lse, ROWS, HEAD_DIM, BLOCK_D, BLOCK_M,
                )  # fmt: skip
                low, high = cuts_within(first, last, size, larger, near)
                merge_when_last(
                    counter_ptr, piece_out_ptr, piece_lse_ptr, share, low - 1, high - low + 2,
                    all_rows, own_rows,
                    out_ptr + q_start * out_stride_token + head * out_stride_head,
                    out_stride_token, out_stride_head,
                    own_lse, lse_stride_token, lse_stride_head, own_sinks,
                    tile, q_len, GROUP, HEAD_DIM, BLOCK_D, BLOCK_M, ROWS,
                )  # fmt: skip
        at = last_of_piece


def launch_shares(
    config: TileConfig,
    target: Target,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seqused_k: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    max_seqlen_q: int,
    softmax_scale: float,
    window: tuple[int, int],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    workspace: torch.Tensor | None,
) -> None:
    """window: (left, right), -1 for all."""
    heads, head_dim = q.shape[1:]
    num_seqs = seqused_k.shape[0]
    page_size, kv_heads = k_cache.shape[1:3]
    group = heads // kv_heads
    num_tiles = triton.cdiv(max_seqlen_q * group, config.block_m)
    per_sm = sharing(q.device, target, config, head_dim, q.dtype, group, num_seqs * kv_heads).per_sm
    shares = num_shares(kv_heads * num_tiles, per_sm, target.num_sms)
    rows = min(config.block_m, max_seqlen_q * group)
    piece_out, piece_lse = partials(workspace, q, shares * 2 * kv_heads * num_tiles * rows)
    lse_strides = (0, 0) if lse is None else lse.stride()
    launch(
        decode_shares_kernel,
        (shares * num_tiles * kv_heads,),
        out,
        lse,
        piece_out,
        piece_lse,
        counter(q.device, shares * num_tiles * kv_heads),
        q,
        k_cache,
        v_cache,
        block_table,
        seqused_k,
        cu_seqlens_q,
        alibi_slopes,
        sinks,
        k_scale,
        v_scale,
        num_seqs,
        num_tiles,
        kv_heads,
        shares,
        *out.stride()[:2],
        *lse_strides,
        *q.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        *scale_strides(k_scale),
        *scale_strides(v_scale),
        block_table.stride(0),
        alibi_stride(alibi_slopes),
        softmax_scale,
        softcap,
        *window,
        HAS_RIGHT=window[1] >= 0,
        HAS_SOFTCAP=softcap > 0,
        PAGE_SIZE=page_size,
        UPCAST=INTERPRETED and q.dtype == torch.bfloat16,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        HAS_LEFT=window[0] >= 0,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_SEQS=block_seqs(num_seqs),
        ROWS=rows,
        **early_launch(q.device),
    )
