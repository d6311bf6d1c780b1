"""Attention of many queries a sequence: FlashAttention-2 (Dao, 2023) over ragged batches, in
portable Triton.

    out = softmax(mask(softcap(scale * q k^T))) v,   lse = log(sum(exp(...)))

Sequences are packed along the token axis with their boundaries in cu_seqlens_q. Keys and values are
packed likewise (cu_seqlens_k), or lie in pages (block_table, seqused_k): chunked prefill and prefix
hits. Products accumulate in fp32; fp32 inputs are multiplied exactly (no TF32). Which key a query
sees, and the order of softcap, ALiBi and mask, is in `_softmax`.

Mutates `out` and `lse`, only at tokens of a sequence: those before cu_seqlens_q[0] or from
cu_seqlens_q[-1] on are left alone.
"""

import torch
import triton
import triton.language as tl

from echokernels._checks import (
    check_absent,
    check_dim,
    check_indices,
    check_range,
    check_same_device,
)
from echokernels._launch import launch
from echokernels._library import define_op
from echokernels._path import current_path
from echokernels._target import INTERPRETED, Target, target_of
from echokernels._tuning import TileConfig, select
from echokernels.attention import prefill_hopper, reference
from echokernels.attention._arguments import (
    CODES,
    alibi_stride,
    check_biases,
    check_boundaries,
    check_cache_scales,
    check_features,
    check_keys,
    check_lengths,
    check_offsets,
    check_page_ids,
    check_pages,
    check_queries,
    scale_strides,
)
from echokernels.attention._tile import attend_tile, store_tile
from echokernels.quant._row import check_has_casts


# Index tensors may be slices at any offset of larger buffers: their alignment varies at run time.
@triton.jit(
    do_not_specialize=[
        "k_scale_ptr", "v_scale_ptr", "k_scale_stride_page", "k_scale_stride_slot",
        "k_scale_stride_head", "v_scale_stride_page", "v_scale_stride_slot", "v_scale_stride_head",
        "cu_seqlens_q_ptr", "cu_seqlens_k_ptr", "seqused_k_ptr", "block_table_ptr", "alibi_ptr",
        "sinks_ptr", "num_tiles", "window_left", "window_right", "table_stride", "alibi_stride",
        "lse_stride_head",
    ]
)  # fmt: skip
def _flash_attn_varlen_kernel(
    out_ptr,  # [tokens, heads, HEAD_DIM]
    lse_ptr,  # f32[heads, tokens], or None
    q_ptr,  # [tokens, heads, HEAD_DIM]
    k_ptr,  # [keys, kv_heads, HEAD_DIM], or pages [num_pages, PAGE_SIZE, kv_heads, HEAD_DIM]
    v_ptr,
    cu_seqlens_q_ptr,  # [num_seqs + 1]
    cu_seqlens_k_ptr,  # [num_seqs + 1], or None
    seqused_k_ptr,  # [num_seqs], or None
    block_table_ptr,  # [num_seqs, max_pages], or None
    alibi_ptr,  # f32[heads] or f32[num_seqs, heads], or None
    sinks_ptr,  # [heads], or None
    k_scale_ptr,  # f32[num_pages, PAGE_SIZE, kv_heads] of a cache of codes, or None
    v_scale_ptr,
    num_tiles,
    kv_heads,
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
    PAGE_SIZE: tl.constexpr,  # 0: contiguous
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UPCAST: tl.constexpr,
):
    # Neighbouring programs are tiles of one (sequence, KV head), so its keys stay in L2; the last
    # tile, the longest under causal attention, comes first.
    pid = tl.program_id(0)
    tile = num_tiles - 1 - pid % num_tiles
    kv_head = ((pid // num_tiles) % kv_heads).to(tl.int64)
    seq = (pid // num_tiles // kv_heads).to(tl.int64)

    q_start = tl.load(cu_seqlens_q_ptr + seq).to(tl.int64)
    q_len = (tl.load(cu_seqlens_q_ptr + seq + 1) - q_start).to(tl.int32)
    if tile * BLOCK_M >= q_len * GROUP:
        return
    k_start = tl.zeros([], tl.int64)
    if PAGE_SIZE == 0:
        k_start = tl.load(cu_seqlens_k_ptr + seq).to(tl.int64)
    if seqused_k_ptr is not None:
        k_len = tl.load(seqused_k_ptr + seq).to(tl.int32)
    else:
        k_len = (tl.load(cu_seqlens_k_ptr + seq + 1) - k_start).to(tl.int32)

    table_ptr = block_table_ptr
    if PAGE_SIZE > 0:
        table_ptr += seq * table_stride
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
        k_start, table_ptr, k_len, 0, k_len, alibi_ptr, sinks_ptr,
        scale, softcap, window_left, window_right, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP,
        PAGE_SIZE, GROUP, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, UPCAST,
    )  # fmt: skip
    if lse_ptr is not None:
        lse_ptr += head * lse_stride_head + q_start * lse_stride_token
    store_tile(
        tile, out, lse,
        out_ptr + q_start * out_stride_token + head * out_stride_head,
        out_stride_token, out_stride_head,
        lse_ptr, lse_stride_token, lse_stride_head, q_len, GROUP, HEAD_DIM, BLOCK_D, BLOCK_M,
    )  # fmt: skip


def _wants_hopper(max_seqlen_q: int) -> bool:
    # Its tiles are of one head, so in short chunks most rows are masked; the portable kernel packs
    # the heads of a group. On an H200 they are even at 64 tokens, with 1 to 8 heads in a group.
    path = current_path()
    return path == "hopper" or (path == "auto" and max_seqlen_q > 64)


def _config(
    head_dim: int, itemsize: int, rows: int, large: bool, target: Target, has_codes: bool = False
) -> TileConfig:
    """block_m rows by block_n keys. A sequence has up to `rows` of (query token, group's head).
    large: pages want large tiles."""
    # A short chunk must not pay for a tile of mostly masked rows; 16 is the tensor cores' least.
    needed = max(16, triton.next_power_of_2(rows))
    wide = head_dim > 128
    if itemsize == 4:
        # Exact fp32 products run on the ordinary cores and keep both operands in registers.
        return TileConfig(min(needed, 16 if wide else 32), 32, num_warps=8, num_stages=1)
    if target.has_wgmma and head_dim > 64 and needed >= 128:
        return _wgmma_config(wide, large)
    large_memory = target.shared_memory > 128 * 1024
    if wide:
        # A row of the accumulator is 256 wide: 64 of them over 8 warps are what fits the registers.
        return TileConfig(min(needed, 64), 32, num_warps=8, num_stages=2 if large_memory else 1)
    # Without WGMMA the operands pass through registers and want 8 warps.
    block_m = min(needed, 64)
    num_warps = 8 if head_dim > 64 and block_m == 64 and not target.has_wgmma else 4
    # Codes are more when they are converted: narrower tiles leave registers for it.
    block_n = 32 if has_codes and num_warps == 4 and not target.has_wgmma else 64
    return TileConfig(block_m, block_n, num_warps, num_stages=3 if large_memory else 2)


def _wgmma_config(wide: bool, large: bool) -> TileConfig:
    """What was fastest of nine tiles on an H200 at 4k and 16k tokens."""
    if wide:
        return TileConfig(128, 32, num_warps=8, num_stages=4)
    if large:
        return TileConfig(128, 128, num_warps=8, num_stages=2)
    return TileConfig(128, 64, num_warps=8, num_stages=3)


def _check(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    block_table: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,  # noqa: ARG001
    window_left: int,
    window_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    check_queries(out, lse, q, softmax_scale)
    check_boundaries("cu_seqlens_q", cu_seqlens_q)
    num_seqs = cu_seqlens_q.shape[0] - 1
    if block_table is not None:
        if seqused_k is None:
            raise ValueError("seqused_k is None, must be given with block_table")
        check_absent("cu_seqlens_k", cu_seqlens_k, "with block_table the key lengths are seqused_k")
        check_pages(q, k, block_table, seqused_k, num_seqs)
    else:
        if cu_seqlens_k is None:
            raise ValueError("cu_seqlens_k is None, must be given without block_table")
        check_dim("k", k, 3)
        check_lengths("cu_seqlens_k", cu_seqlens_k, num_seqs + 1)
        if seqused_k is not None:
            check_lengths("seqused_k", seqused_k, num_seqs)
    check_keys(q, k, v, ("k", "v"), CODES if block_table is not None else ())
    check_cache_scales(k, v, k_scale, v_scale, ("k", "v"))
    check_range("max_seqlen_q", max_seqlen_q, 0)
    check_range("max_seqlen_k", max_seqlen_k, 0)
    check_features(window_left, window_right, softcap)
    check_biases(q, alibi_slopes, sinks, num_seqs)
    check_same_device(
        "q", q, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_k=seqused_k
    )


def _debug_check(
    out: torch.Tensor,  # noqa: ARG001
    lse: torch.Tensor | None,  # noqa: ARG001
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,  # noqa: ARG001
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    block_table: torch.Tensor | None,
    max_seqlen_q: int,
    *_: object,
) -> None:
    check_offsets("cu_seqlens_q", cu_seqlens_q, q.shape[0], max_seqlen_q)
    if cu_seqlens_k is not None:
        check_offsets("cu_seqlens_k", cu_seqlens_k, k.shape[0], k.shape[0])
        if seqused_k is not None:
            check_indices(
                "cu_seqlens_k + seqused_k", cu_seqlens_k[:-1] + seqused_k, 0, k.shape[0] + 1
            )
    if block_table is not None and seqused_k is not None:
        check_page_ids(k, block_table, seqused_k)


def _launch(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    block_table: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,  # noqa: ARG001
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    num_seqs = cu_seqlens_q.shape[0] - 1
    if q.shape[0] == 0 or q.shape[1] == 0 or num_seqs == 0:
        return
    target = target_of(q.device)
    check_has_casts("k", k)
    if _wants_hopper(max_seqlen_q) and prefill_hopper.can_run(
        target, q, k, v, out, num_seqs, block_table, softmax_scale
    ):
        head_dim = q.shape[2]
        shape = (head_dim, k_scale is not None)
        tile = select("flash_attn_varlen_hopper", shape, lambda: prefill_hopper.config(*shape))
        window = (window_left, 0 if causal else window_right)
        prefill_hopper.launch_hopper(
            tile, target, out, lse, q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table,
            softmax_scale, window, softcap, alibi_slopes, sinks, k_scale, v_scale,
        )  # fmt: skip
        return
    head_dim, kv_heads = q.shape[2], k.shape[-2]
    group = q.shape[1] // kv_heads
    rows = max_seqlen_q * group
    paged, has_codes = block_table is not None, k_scale is not None
    # Codes are converted in registers: the large tiles that go with pages leave none for it.
    large = paged and not has_codes
    size, most = q.element_size(), min(triton.next_power_of_2(max(rows, 1)), 128)
    config = select(
        "flash_attn_varlen",
        (head_dim, size, most, large, target.name, has_codes),
        lambda: _config(head_dim, size, rows, large, target, has_codes),
    )
    num_tiles = triton.cdiv(rows, config.block_m)
    launch(
        _flash_attn_varlen_kernel,
        (num_tiles * kv_heads * num_seqs,),
        out,
        lse,
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_k,
        block_table,
        alibi_slopes,
        sinks,
        k_scale,
        v_scale,
        num_tiles,
        kv_heads,
        *out.stride()[:2],
        *((0, 0) if lse is None else lse.stride()),
        *q.stride()[:2],
        *(k.stride()[:3] if paged else (0, *k.stride()[:2])),
        *(v.stride()[:3] if paged else (0, *v.stride()[:2])),
        *scale_strides(k_scale),
        *scale_strides(v_scale),
        block_table.stride(0) if block_table is not None else 0,
        alibi_stride(alibi_slopes),
        softmax_scale,
        softcap,
        window_left,
        0 if causal else window_right,
        HAS_LEFT=window_left >= 0,
        HAS_RIGHT=causal or window_right >= 0,
        HAS_SOFTCAP=softcap > 0,
        PAGE_SIZE=k.shape[1] if paged else 0,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        UPCAST=INTERPRETED and q.dtype == torch.bfloat16,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


_flash_attn_varlen = define_op(
    "flash_attn_varlen(Tensor(a!) out, Tensor(b!)? lse, Tensor q, Tensor k, Tensor v, Tensor "
    "cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k, Tensor? block_table, SymInt "
    "max_seqlen_q, SymInt max_seqlen_k, float softmax_scale, bool causal, int window_left, int "
    "window_right, float softcap, Tensor? alibi_slopes, Tensor? sinks, Tensor? k_scale, Tensor? "
    "v_scale) -> ()",
    check=_check,
    triton=_launch,
    reference=reference.flash_attn_varlen,
    debug_check=_debug_check,
)


def flash_attn_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention over a ragged batch of sequences.

    q: [tokens, heads, head_dim], head_dim a multiple of 8 up to 256. k, v: [keys, kv_heads,
    head_dim] with cu_seqlens_k, or pages [num_pages, page_size, kv_heads, head_dim] with
    block_table [num_seqs, max_pages] and seqused_k [num_seqs]. fp16, bf16 or fp32, any strides with
    the last dimension contiguous; heads a multiple of kv_heads. cu_seqlens_q, cu_seqlens_k:
    [num_seqs + 1], int32 or int64. seqused_k without pages: keys used of each. Pages may hold int8
    or float8_e4m3fn codes: k_scale and v_scale are then f32 [num_pages, page_size, kv_heads], any
    strides.

    max_seqlen_q: at least the longest query length (the number of tokens by default); rows beyond
    it are not computed. softmax_scale: 1 / sqrt(head_dim) by default. window: (left, right) keys
    seen besides the aligned one, -1 for all; causal sets right to 0. softcap: 0 for none.
    alibi_slopes: f32 [heads] or [num_seqs, heads]; the score of a key at distance d is lowered by
    slope * d. sinks: [heads], the logit of a key that every query sees and that has no value.

    Returns out [tokens, heads, head_dim], and with return_lse also lse f32[heads, tokens] (natural
    logarithm, sinks included). A query with no visible key gives 0 and -inf, or 0 and its sink.
    Raises ValueError or TypeError for arguments that do not fit.
    """
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32) if return_lse else None
    _flash_attn_varlen(
        out,
        lse,
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_k,
        block_table,
        q.shape[0] if max_seqlen_q is None else max_seqlen_q,
        k.shape[0] * (1 if block_table is None else k.shape[1])
        if max_seqlen_k is None
        else max_seqlen_k,
        q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        causal,
        *window,
        softcap,
        alibi_slopes,
        sinks,
        k_scale,
        v_scale,
    )
    return out if lse is None else (out, lse)
