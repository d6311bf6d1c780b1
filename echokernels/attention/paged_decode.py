"""Attention of few queries a sequence over pages.

Decoding reads the whole cache for little arithmetic, so the keys of a sequence are split among
several programs. By default the keys of all sequences together are cut into equal shares, by a
kernel for Hopper (`decode_hopper.py`) or a portable one (`_decode_shares.py`). Splits that are
forced or independent of the batch, and batches of very many sequences, are chunks of each sequence
(`_decode_chunks.py`).

Grid and workspace follow from capacity alone; every program finds its part from `seqused_k` on the
device. One captured graph therefore serves any lengths, and rows padded with length 0 get 0 and
-inf.

Mutates `out`, `lse` and `workspace` (scratch; nothing in it outlives the call).
"""

import torch

from echokernels._checks import check_contiguous, check_dim, check_range, check_same_device
from echokernels._library import define_op
from echokernels._path import current_path
from echokernels._target import target_of
from echokernels.attention import decode_hopper, reference
from echokernels.attention._arguments import (
    CODES,
    check_biases,
    check_cache_scales,
    check_features,
    check_keys,
    check_lengths,
    check_offsets,
    check_page_ids,
    check_pages,
    check_queries,
)
from echokernels.attention._decode_chunks import launch_chunks
from echokernels.attention._decode_config import decode_config
from echokernels.attention._decode_shares import launch_shares
from echokernels.attention.split import MAX_QUERIES, MOST_SEQS
from echokernels.quant._row import check_has_casts


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
    if workspace is not None:
        check_contiguous("workspace", workspace)
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
    check_has_casts("k_cache", k_cache)
    window = (window_left, 0 if causal else window_right)
    if _wants_hopper(num_splits, kv_split_size) and decode_hopper.can_run(
        target, q, k_cache, v_cache, num_seqs, max_seqlen_q, softmax_scale
    ):
        decode_hopper.launch_hopper(
            target, out, lse, q, k_cache, v_cache, block_table, seqused_k, cu_seqlens_q,
            max_seqlen_q, softmax_scale, window, softcap, alibi_slopes, sinks, k_scale, v_scale,
            workspace,
        )  # fmt: skip
        return
    is_invariant = kv_split_size > 0 and cu_seqlens_q is not None
    config, _ = decode_config(
        head_dim, q.dtype, heads // k_cache.shape[2], max_seqlen_q, is_invariant, target,
        k_scale is not None,
    )  # fmt: skip
    if num_splits == 0 and kv_split_size == 0 and num_seqs <= MOST_SEQS:
        launch_shares(
            config, target, out, lse, q, k_cache, v_cache, block_table, seqused_k, cu_seqlens_q,
            max_seqlen_q, softmax_scale, window, softcap, alibi_slopes, sinks, k_scale, v_scale,
            workspace,
        )  # fmt: skip
        return
    launch_chunks(
        config, target, out, lse, q, k_cache, v_cache, block_table, seqused_k, cu_seqlens_q,
        max_seqlen_q, softmax_scale, window, softcap, alibi_slopes, sinks, k_scale, v_scale,
        num_splits, kv_split_size, workspace,
    )  # fmt: skip


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
