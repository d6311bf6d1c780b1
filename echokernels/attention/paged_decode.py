"""Attention of few queries a sequence over pages: split-K flash decoding (Dao et al.,
"Flash-Decoding", 2023).

Decoding reads the whole cache for little arithmetic, so keys are split among several programs. By
default those of all sequences together are cut into equal shares, by a kernel for Hopper
(`decode_hopper.py`) or a portable one (`_decode_shares.py`).

Splits that are forced or independent of the batch, and batches of very many sequences, go by chunks
of each sequence, here. Each program writes the attention over its chunk, in fp32, with its LSE; a
second kernel merges them. With one split the first kernel writes the output itself. Chunks beyond a
sequence's end are neither written nor read.

Grid and workspace follow from capacity alone; every program finds its part from `seqused_k` on the
device. One captured graph therefore serves any lengths, and rows padded with length 0 get 0 and
-inf.

Mutates `out`, `lse` and `workspace` (scratch; nothing in it outlives the call).
"""

import torch
import triton
import triton.language as tl

from echokernels._checks import check_dim, check_range, check_same_device
from echokernels._launch import counter, launch
from echokernels._library import define_op
from echokernels._pdl import early_launch
from echokernels._target import INTERPRETED, Target, target_of
from echokernels._tuning import TileConfig, select
from echokernels.attention import decode_hopper, reference
from echokernels.attention._arguments import (
    CODES,
    alibi_stride,
    check_biases,
    check_cache_scales,
    check_can_decode,
    check_features,
    check_keys,
    check_lengths,
    check_offsets,
    check_page_ids,
    check_pages,
    check_queries,
    scale_strides,
)
from echokernels.attention._decode_shares import decode_shares_kernel
from echokernels.attention._path import current_path
from echokernels.attention._sharing import Kind, Sharing, sharing_of
from echokernels.attention._split_k import chunks, merge_splits_kernel, query_range
from echokernels.attention._tile import attend_tile, store_tile
from echokernels.attention.split import (
    INVARIANT_SPLITS,
    MAX_QUERIES,
    MIN_KEYS,
    MOST_SEQS,
    MOST_SHARES_PER_SM,
    block_seqs,
    choose_num_splits,
    num_shares,
)
from echokernels.attention.workspace import partials

_MOST_PROGRAMS_PER_SM = 4


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
def _paged_attention_kernel(
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


def _config(
    head_dim: int, itemsize: int, rows: int, target: Target, has_codes: bool = False
) -> TileConfig:
    """block_m rows by block_n keys. A sequence has up to `rows` of (query token, group's head)."""
    wide = head_dim > 128
    if itemsize == 4:
        # Exact fp32 products run on the ordinary cores and keep both operands in registers.
        return TileConfig(16, 16 if wide else 32, num_warps=4, num_stages=1)
    # 16 is the tensor cores' least; several queries of a large group take several tiles.
    block_m = min(max(16, triton.next_power_of_2(rows)), 32 if wide else 64)
    block_n = 32 if wide else 64
    # On an H200 two warps a program read 64 x 8k at 4.43 TB/s, four at 4.24, eight at 3.30: fewer
    # warps mean more programs, and so more independent loads, on an SM.
    # Codes are converted in registers, of which two warps have too few.
    num_warps = 2 if block_m == 16 and not wide and not has_codes else 4
    if block_m == 64 and head_dim > 64 and target.arch != 90:
        # Without WGMMA the operands pass through registers.
        num_warps = 8
    # A third stage gains nothing there, and costs a program on each SM.
    num_stages = (3 if target.shared_memory >= 128 * 1024 else 1) if wide else 2
    return TileConfig(block_m, block_n, num_warps, num_stages)


def decode_config(
    head_dim: int,
    dtype: torch.dtype,
    group: int,
    max_seqlen_q: int,
    is_invariant: bool,
    target: Target,
    has_codes: bool = False,
) -> tuple[TileConfig, int]:
    """(tile of the portable kernel, tiles of rows that a sequence has at most). is_invariant: the
    tile must not follow the longest query of the batch."""
    rows = (MAX_QUERIES if is_invariant else max_seqlen_q) * group
    key = (head_dim, dtype.itemsize, min(triton.next_power_of_2(rows), 64), target.name, has_codes)
    config = select(
        "paged_attention",
        key,
        lambda: _config(head_dim, dtype.itemsize, rows, target, has_codes),
    )
    return config, triton.cdiv(max_seqlen_q * group, config.block_m)


def sharing(
    device: torch.device,
    target: Target,
    config: TileConfig,
    head_dim: int,
    dtype: torch.dtype,
    group: int,
    units: int,
) -> Sharing:
    """Of the portable kernel, whose tiles are `config`. units: sequences times KV heads."""
    allowed = portable_sharings(config, head_dim, dtype, target)
    kind = Kind("portable", head_dim, dtype, group, units > target.num_sms)
    return sharing_of(device, kind, allowed[0], allowed)


def portable_sharings(
    config: TileConfig, head_dim: int, dtype: torch.dtype, target: Target
) -> tuple[Sharing, ...]:
    """What may be calibrated, the default first: as many programs as an SM holds at once, each with
    a tile of K and of V and the queries, up to the four that were best on an H200."""
    row_bytes = max(16, triton.next_power_of_2(head_dim)) * dtype.itemsize
    tile_bytes = (2 * config.block_n + config.block_m) * row_bytes
    default = min(max(target.shared_memory // tile_bytes, 1), _MOST_PROGRAMS_PER_SM)
    others = (n for n in range(1, MOST_SHARES_PER_SM + 1) if n != default)
    return tuple(Sharing(config.block_n, n) for n in (default, *others))


def _wants_hopper(num_splits: int, kv_split_size: int) -> bool:
    """Only where splits are neither forced nor to be independent of the batch."""
    return num_splits == 0 and kv_split_size == 0 and current_path() != "portable"


def _check(
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
    causal: bool,  # noqa: ARG001
    window_left: int,
    window_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    num_splits: int,
    kv_split_size: int,
    workspace: torch.Tensor | None,
) -> None:
    check_queries(out, lse, q, softmax_scale)
    check_dim("seqused_k", seqused_k, 1)
    num_seqs = seqused_k.shape[0]
    check_pages(q, k_cache, block_table, seqused_k, num_seqs)
    check_keys(q, k_cache, v_cache, ("k_cache", "v_cache"), CODES)
    check_cache_scales(k_cache, v_cache, k_scale, v_scale)
    if cu_seqlens_q is not None:
        check_lengths("cu_seqlens_q", cu_seqlens_q, num_seqs + 1)
    elif q.shape[0] != num_seqs:
        raise ValueError(
            f"q.shape is {tuple(q.shape)}, must start with {num_seqs}, one query a sequence, "
            "without cu_seqlens_q"
        )
    check_range("max_seqlen_q", max_seqlen_q, 1, 1 if cu_seqlens_q is None else MAX_QUERIES)
    check_features(window_left, window_right, softcap)
    check_biases(q, alibi_slopes, sinks, num_seqs)
    check_range("num_splits", num_splits, 0)
    check_range("kv_split_size", kv_split_size, 0)
    if workspace is not None and not workspace.is_contiguous():
        raise ValueError(f"workspace.stride() is {workspace.stride()}, must be contiguous")
    check_same_device("q", q, cu_seqlens_q=cu_seqlens_q, workspace=workspace)


def _debug_check(
    out: torch.Tensor,  # noqa: ARG001
    lse: torch.Tensor | None,  # noqa: ARG001
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,  # noqa: ARG001
    block_table: torch.Tensor,
    seqused_k: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    max_seqlen_q: int,
    *_: object,
) -> None:
    check_page_ids(k_cache, block_table, seqused_k)
    if cu_seqlens_q is not None:
        check_offsets("cu_seqlens_q", cu_seqlens_q, q.shape[0], max_seqlen_q)


def _launch(
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
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    num_splits: int,
    kv_split_size: int,
    workspace: torch.Tensor | None,
) -> None:
    num_tokens, heads, head_dim = q.shape
    num_seqs = seqused_k.shape[0]
    if num_tokens == 0 or heads == 0 or num_seqs == 0:
        return
    max_seqlen_q = min(max_seqlen_q, num_tokens)
    target = target_of(q.device)
    check_can_decode("k_cache", k_cache, target)
    if _wants_hopper(num_splits, kv_split_size) and decode_hopper.can_run(
        target, q, k_cache, v_cache, num_seqs, max_seqlen_q, softmax_scale
    ):
        decode_hopper.launch_hopper(
            target, out, lse, q, k_cache, v_cache, block_table, seqused_k, cu_seqlens_q,
            max_seqlen_q, softmax_scale, (window_left, 0 if causal else window_right), softcap,
            alibi_slopes, sinks, k_scale, v_scale, workspace,
        )  # fmt: skip
        return
    page_size, kv_heads = k_cache.shape[1:3]
    group = heads // kv_heads
    is_invariant = kv_split_size > 0 and cu_seqlens_q is not None
    config, num_tiles = decode_config(
        head_dim, q.dtype, group, max_seqlen_q, is_invariant, target, k_scale is not None
    )
    if num_splits == 0 and kv_split_size == 0 and num_seqs <= MOST_SEQS:
        _launch_shares(
            config, target, out, lse, q, k_cache, v_cache, block_table, seqused_k, cu_seqlens_q,
            max_seqlen_q, softmax_scale, (window_left, 0 if causal else window_right), softcap,
            alibi_slopes, sinks, k_scale, v_scale, workspace,
        )  # fmt: skip
        return
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
        _paged_attention_kernel,
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
        *scale_strides(k_scale, v_scale),
        block_table.stride(0),
        alibi_stride(alibi_slopes),
        softmax_scale,
        softcap,
        window_left,
        0 if causal else window_right,
        SPLIT=splits > 1,
        HAS_LEFT=window_left >= 0,
        HAS_RIGHT=causal or window_right >= 0,
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
        window_left,
        HAS_LEFT=window_left >= 0,
        HEAD_DIM=head_dim,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_N=config.block_n,
        BLOCK_S=16,
        num_warps=2,
    )


def _launch_shares(
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
        *scale_strides(k_scale, v_scale),
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


_paged_attention = define_op(
    "paged_attention(Tensor(a!) out, Tensor(b!)? lse, Tensor q, Tensor k_cache, Tensor v_cache, "
    "Tensor block_table, Tensor seqused_k, Tensor? cu_seqlens_q, SymInt max_seqlen_q, float "
    "softmax_scale, bool causal, int window_left, int window_right, float softcap, Tensor? "
    "alibi_slopes, Tensor? sinks, Tensor? k_scale, Tensor? v_scale, int num_splits, int "
    "kv_split_size, Tensor(c!)? workspace) -> ()",
    check=_check,
    triton=_launch,
    reference=reference.paged_attention,
    debug_check=_debug_check,
)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seqused_k: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int = 1,
    softmax_scale: float | None = None,
    causal: bool = True,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    num_splits: int = 0,
    kv_split_size: int = 0,
    workspace: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of 1 to 16 queries a sequence over a paged KV cache.

    q: [num_seqs, heads, head_dim], or [tokens, heads, head_dim] with cu_seqlens_q [num_seqs + 1]
    and max_seqlen_q. k_cache, v_cache: [num_pages, page_size, kv_heads, head_dim], any page size,
    any strides with the last dimension contiguous. block_table: [num_seqs, max_pages] page ids;
    entries past a sequence's last page are not read. seqused_k: [num_seqs] keys of each sequence,
    its own queries included. Indices are int32 or int64; the others fp16, bf16 or fp32; head_dim a
    multiple of 8 up to 256; heads a multiple of kv_heads. The caches may hold int8 or float8_e4m3fn
    codes: k_scale and v_scale are then f32 [num_pages, page_size, kv_heads], any strides. window,
    softcap, alibi_slopes, sinks: as in `flash_attn_varlen`.

    num_splits: 0 chooses, 1 does not split, n splits every sequence n ways. kv_split_size > 0 makes
    the result of a sequence independent of its batch, bit for bit: its chunks are
    max(kv_split_size, length / 32 rounded up to a tile). workspace: scratch of
    `attention_workspace_size` bytes; allocated when absent.

    Returns out, shaped as q, and with return_lse also lse f32[heads, tokens] (natural logarithm,
    sinks included). A query with no visible key gives 0 and -inf, or 0 and its sink. Raises
    ValueError or TypeError for arguments that do not fit.
    """
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32) if return_lse else None
    _paged_attention(
        out,
        lse,
        q,
        k_cache,
        v_cache,
        block_table,
        seqused_k,
        cu_seqlens_q,
        max_seqlen_q,
        q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        causal,
        *window,
        softcap,
        alibi_slopes,
        sinks,
        k_scale,
        v_scale,
        num_splits,
        kv_split_size,
        workspace,
    )
    return out if lse is None else (out, lse)
