"""Decode by chunks of each sequence, in portable Triton: split-K flash decoding (Dao et al.,
"Flash-Decoding", 2023).

The keys of a (sequence, KV head) are split among several programs. Each writes the attention over
its chunk, in fp32, with its LSE; a second kernel merges them. With one split the first kernel
writes the output itself. Chunks beyond a sequence's end are neither written nor read.
"""

import torch
import triton
import triton.language as tl

from echokernels._launch import launch
from echokernels._target import INTERPRETED, Target
from echokernels._tuning import TileConfig
from echokernels.attention._arguments import alibi_stride, scale_strides
from echokernels.attention._split_k import chunks, merge_splits_kernel, query_range
from echokernels.attention._tile import attend_tile, store_tile
from echokernels.attention.split import INVARIANT_SPLITS, MIN_KEYS, choose_num_splits
from echokernels.attention.workspace import partials


# Index tensors may be slices at any offset of larger buffers: their alignment varies at run time.
@triton.jit(
    do_not_specialize=[
        "k_scale_ptr", "v_scale_ptr", "k_scale_stride_page", "k_scale_stride_slot",
        "k_scale_stride_head", "v_scale_stride_page", "v_scale_stride_slot", "v_scale_stride_head",
        "block_table_ptr", "seqused_k_ptr", "cu_seqlens_q_ptr", "alibi_ptr", "sinks_ptr",
        "num_seqs", "num_tiles", "num_tokens", "split_divisor", "min_chunk", "window_left",
        "window_right", "table_stride", "alibi_stride", "lse_stride_head",
    ]
)  # fmt: skip
def decode_chunks_kernel(
    out_ptr,  # [num_tokens, heads, HEAD_DIM]
    lse_ptr,  # f32[heads, num_tokens], or None
    partial_out_ptr,  # f32[splits, num_tokens, heads, HEAD_DIM], or None without SPLIT
    partial_lse_ptr,  # f32[splits, num_tokens, heads], natural logarithm
    q_ptr,  # [num_tokens, heads, HEAD_DIM]
    k_ptr,  # [num_pages, PAGE_SIZE, kv_heads, HEAD_DIM]
    v_ptr,
    block_table_ptr,  # [num_seqs, max_pages]
    seqused_k_ptr,  # [num_seqs]
    cu_seqlens_q_ptr,  # [num_seqs + 1], or None: one query each
    alibi_ptr,  # f32[heads] or f32[num_seqs, heads], or None
    sinks_ptr,  # [heads], or None: with SPLIT the kernel that merges adds them
    k_scale_ptr,  # f32[num_pages, PAGE_SIZE, kv_heads] of a cache of codes, or None
    v_scale_ptr,
    num_seqs,
    num_tiles,
    num_tokens,
    kv_heads,
    split_divisor,
    min_chunk,
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
    SPLIT: tl.constexpr,
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
    # KV heads are neighbours: their keys lie side by side in a page.
    pid = tl.program_id(0)
    kv_head = (pid % kv_heads).to(tl.int64)
    tile = pid // kv_heads % num_tiles
    seq = (pid // kv_heads // num_tiles % num_seqs).to(tl.int64)
    split_id = (pid // kv_heads // num_tiles // num_seqs).to(tl.int64)

    q_start, q_len = query_range(seq, cu_seqlens_q_ptr)
    if tile * BLOCK_M >= q_len * GROUP:
        return
    k_len = tl.load(seqused_k_ptr + seq).to(tl.int32)
    first_key, chunk = chunks(
        q_len, k_len, split_divisor, min_chunk, window_left, HAS_LEFT, BLOCK_N
    )
    share_begin = first_key + split_id.to(tl.int32) * chunk
    share_end = k_len
    if SPLIT:
        share_end = tl.minimum(k_len, share_begin + chunk)
        if share_begin >= k_len:
            return

    head = kv_head * GROUP
    if alibi_ptr is not None:
        alibi_ptr += seq * alibi_stride + head
    if sinks_ptr is not None:
        sinks_ptr += head
    if k_scale_ptr is not None:
        k_scale_ptr += kv_head * k_scale_stride_head
        v_scale_ptr += kv_head * v_scale_stride_head
    out, lse = attend_tile(
        tile,
        q_ptr + q_start * q_stride_token + head * q_stride_head,
        q_stride_token, q_stride_head, q_len,
        k_ptr + kv_head * k_stride_head, k_stride_page, k_stride_slot,
        v_ptr + kv_head * v_stride_head, v_stride_page, v_stride_slot,
        k_scale_ptr, k_scale_stride_page, k_scale_stride_slot,
        v_scale_ptr, v_scale_stride_page, v_scale_stride_slot,
        0, block_table_ptr + seq * table_stride, k_len, share_begin, share_end,
        alibi_ptr, sinks_ptr,
        scale, softcap, window_left, window_right, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP,
        PAGE_SIZE, GROUP, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, UPCAST,
    )  # fmt: skip
    if SPLIT:
        # Partials are [splits, tokens, heads, ...], contiguous.
        heads = kv_heads * GROUP
        first = (split_id * num_tokens + q_start) * heads + head
        store_tile(
            tile, out, lse,
            partial_out_ptr + first * HEAD_DIM, heads * HEAD_DIM, HEAD_DIM,
            partial_lse_ptr + first, heads, 1, q_len, GROUP, HEAD_DIM, BLOCK_D, BLOCK_M,
        )  # fmt: skip
    else:
        if lse_ptr is not None:
            lse_ptr += head * lse_stride_head + q_start * lse_stride_token
        store_tile(
            tile, out, lse,
            out_ptr + q_start * out_stride_token + head * out_stride_head,
            out_stride_token, out_stride_head,
            lse_ptr, lse_stride_token, lse_stride_head, q_len, GROUP, HEAD_DIM, BLOCK_D, BLOCK_M,
        )  # fmt: skip


def launch_chunks(
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
    num_splits: int,
    kv_split_size: int,
    workspace: torch.Tensor | None,
) -> None:
    """window: (left, right), -1 for all."""
    num_tokens, heads, head_dim = q.shape
    num_seqs = seqused_k.shape[0]
    page_size, kv_heads = k_cache.shape[1:3]
    group = heads // kv_heads
    num_tiles = triton.cdiv(max_seqlen_q * group, config.block_m)
    splits = choose_num_splits(
        num_splits,
        kv_split_size,
        num_seqs * kv_heads * num_tiles,
        block_table.shape[1] * page_size,
        target.num_sms,
    )
    partial_out, partial_lse = (
        partials(workspace, q, splits * num_tokens * heads) if splits > 1 else (None, None)
    )
    split_divisor = INVARIANT_SPLITS if kv_split_size > 0 else splits
    min_chunk = kv_split_size if kv_split_size > 0 else 1 if num_splits > 0 else MIN_KEYS
    lse_strides = (0, 0) if lse is None else lse.stride()
    launch(
        decode_chunks_kernel,
        (splits * num_seqs * num_tiles * kv_heads,),
        out,
        lse,
        partial_out,
        partial_lse,
        q,
        k_cache,
        v_cache,
        block_table,
        seqused_k,
        cu_seqlens_q,
        alibi_slopes,
        sinks if splits == 1 else None,
        k_scale,
        v_scale,
        num_seqs,
        num_tiles,
        num_tokens,
        kv_heads,
        split_divisor,
        min_chunk,
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
        SPLIT=splits > 1,
        HAS_LEFT=window[0] >= 0,
        HAS_RIGHT=window[1] >= 0,
        HAS_SOFTCAP=softcap > 0,
        PAGE_SIZE=page_size,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        UPCAST=INTERPRETED and q.dtype == torch.bfloat16,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if splits == 1:
        return
    launch(
        merge_splits_kernel,
        (num_seqs * max_seqlen_q * heads,),
        out,
        lse,
        partial_out,
        partial_lse,
        seqused_k,
        cu_seqlens_q,
        sinks,
        num_tokens,
        max_seqlen_q,
        heads,
        split_divisor,
        min_chunk,
        *out.stride()[:2],
        *lse_strides,
        window[0],
        HAS_LEFT=window[0] >= 0,
        HEAD_DIM=head_dim,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_N=config.block_n,
        BLOCK_S=16,
        num_warps=2,
    )
