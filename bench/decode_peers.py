"""Decode kernels of other libraries as peers. What each plans on the host is done beforehand."""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.case import Peer
from bench.timing import Call

_ONE_QUERY = frozenset({"one-query"})
_PLAIN = frozenset({"one-query", "no-window"})
# Of FlashInfer, what is built beforehand: head dim 128 without windows, XQA with pages of 16.
_BUILT = frozenset({"head-dim-128", "no-window"})


def flashinfer() -> dict[str, Peer]:
    return {
        "flashinfer": Peer(_flashinfer_decode(tensor_cores=False), needs=_ONE_QUERY | _BUILT),
        "flashinfer-tc": Peer(_flashinfer_decode(tensor_cores=True), needs=_ONE_QUERY | _BUILT),
        "flashinfer-prefill": Peer(_flashinfer_prefill, needs=_BUILT | {"queries"}),
        "flashinfer-xqa": Peer(_flashinfer_xqa, needs=_ONE_QUERY | _BUILT | {"page-16"}),
    }


@cache
def _memory(num_bytes: int, device: torch.device) -> Tensor:
    """Calls follow one another, so all of them work in the same."""
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)


class _Pages(NamedTuple):
    """A block table as FlashInfer takes it."""

    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor


def _pages(block_table: Tensor, seqused_k: Tensor, page_size: int) -> _Pages:
    counts = [-(-n // page_size) for n in seqused_k.tolist()]
    return _Pages(
        torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=block_table.device),
        torch.cat([row[:n] for row, n in zip(block_table, counts, strict=True)]),
        (seqused_k - 1) % page_size + 1,
    )


def _flashinfer_decode(*, tensor_cores: bool) -> Callable[..., Call]:
    def prepare(*inputs: Any) -> Call:
        q, k_cache, v_cache, block_table, seqused_k, *_ = inputs
        page_size = k_cache.shape[1]
        pages = _pages(block_table, seqused_k, page_size)
        wrapper = import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper(
            _memory(1 << 30, q.device),
            "NHD",
            use_tensor_cores=tensor_cores,
            use_cuda_graph=True,
            paged_kv_indptr_buffer=torch.empty_like(pages.indptr),
            paged_kv_indices_buffer=torch.empty_like(pages.indices),
            paged_kv_last_page_len_buffer=torch.empty_like(pages.last_page_len),
        )
        wrapper.plan(
            *pages, q.shape[1], *k_cache.shape[2:], page_size,
            q_data_type=q.dtype, kv_data_type=q.dtype,
        )  # fmt: skip
        out = torch.empty_like(q)
        return lambda: wrapper.run(q, (k_cache, v_cache), out=out)

    return prepare


def _flashinfer_prefill(*inputs: Any) -> Call:
    q, k_cache, v_cache, block_table, seqused_k, cu_seqlens_q, *_ = inputs
    page_size = k_cache.shape[1]
    pages = _pages(block_table, seqused_k, page_size)
    wrapper = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper(
        _memory(1 << 30, q.device),
        "NHD",
        use_cuda_graph=True,
        qo_indptr_buf=torch.empty_like(cu_seqlens_q),
        paged_kv_indptr_buf=torch.empty_like(pages.indptr),
        paged_kv_indices_buf=torch.empty_like(pages.indices),
        paged_kv_last_page_len_buf=torch.empty_like(pages.last_page_len),
        backend="fa2",  # which splits keys
    )
    wrapper.plan(
        cu_seqlens_q, *pages, q.shape[1], *k_cache.shape[2:], page_size, causal=True,
        q_data_type=q.dtype, kv_data_type=q.dtype,
    )  # fmt: skip
    out = torch.empty_like(q)
    return lambda: wrapper.run(q, (k_cache, v_cache), out=out)


def _flashinfer_xqa(*inputs: Any) -> Call:
    q, k_cache, v_cache, block_table, seqused_k, _, _, max_seqlen_k, _ = inputs
    xqa = import_module("flashinfer.decode").xqa_batch_decode_with_kv_cache
    memory = _memory(512 << 20, q.device)
    out = torch.empty_like(q)
    return lambda: xqa(
        q, (k_cache, v_cache), memory, block_table, seqused_k, max_seqlen_k,
        bmm1_scale=q.shape[-1] ** -0.5, bmm2_scale=1.0, out=out, kv_layout="NHD",
    )  # fmt: skip


def vllm_fa3(flash_attn: Any) -> dict[str, Peer]:
    """With its scheduler's metadata, as vLLM calls it in CUDA graphs."""

    def prepare(*inputs: Any) -> Call:
        q, k_cache, v_cache, block_table, seqused_k, cu_seqlens_q, *rest = inputs
        max_seqlen_q, max_seqlen_k, window_left = rest
        num_splits = 32
        window = [window_left, 0 if window_left >= 0 else -1]
        plan = flash_attn.get_scheduler_metadata(
            seqused_k.shape[0], max_seqlen_q, max_seqlen_k, q.shape[1], *k_cache.shape[2:],
            seqused_k, qkv_dtype=q.dtype, cu_seqlens_q=cu_seqlens_q, page_size=k_cache.shape[1],
            causal=True, window_size=window, num_splits=num_splits,
        )  # fmt: skip
        out = torch.empty_like(q)
        return lambda: flash_attn.flash_attn_varlen_func(
            q, k_cache, v_cache, max_seqlen_q=max_seqlen_q, cu_seqlens_q=cu_seqlens_q,
            max_seqlen_k=max_seqlen_k, seqused_k=seqused_k, causal=True, window_size=window,
            block_table=block_table, fa_version=3, out=out, scheduler_metadata=plan,
            num_splits=num_splits,
        )  # fmt: skip

    return {"vllm-fa3": Peer(prepare)}


def vllm_triton(unified_attention: Callable[..., Any]) -> dict[str, Peer]:
    return {"vllm-triton": Peer(_unified(unified_attention))}


def vllm_triton_int8(unified_attention: Callable[..., Any], mode: Any) -> dict[str, Peer]:
    """mode: scales of tokens and KV heads."""

    def prepare(*inputs: Any) -> Call:
        q, k, v, block_table, seqused_k, k_scale, v_scale = inputs
        ones = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
        quantised = _unified(
            unified_attention, kv_quant_mode=mode, k_scale_cache=k_scale, v_scale_cache=v_scale
        )
        return quantised(q, k, v, block_table, seqused_k, ones, 1, int(seqused_k.max()), -1)

    return {"vllm-triton-int8": Peer(prepare)}


def _unified(unified_attention: Callable[..., Any], **options: Any) -> Callable[..., Call]:
    segments, grid = 16, 128  # vLLM's, and the least grid for which it does not split

    def prepare(*inputs: Any) -> Call:
        q, k_cache, v_cache, block_table, seqused_k, cu_seqlens_q, *rest = inputs
        max_seqlen_q, max_seqlen_k, window_left = rest
        threshold = max(grid // k_cache.shape[2], 1)
        rows = (threshold, q.shape[1], segments)
        partial = q.new_empty(*rows, q.shape[2], dtype=torch.float32)
        tops, sums = (q.new_empty(rows, dtype=torch.float32) for _ in range(2))
        one, out = torch.ones(1, device=q.device), torch.empty_like(q)
        window = (window_left, 0) if window_left >= 0 else (-1, -1)

        def call() -> Tensor:
            unified_attention(
                q, k_cache, v_cache, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k,
                q.shape[2] ** -0.5, True, window, block_table, 0, None, one, one,
                seq_threshold_3D=threshold, num_par_softmax_segments=segments,
                softmax_segm_output=partial, softmax_segm_max=tops, softmax_segm_expsum=sums,
                **options,
            )  # fmt: skip
            return out

        return call

    return prepare


def sglang(attend: Callable[..., Any], count_splits: Any) -> dict[str, Peer]:
    most_splits = 8  # SGLang's default

    def prepare(*inputs: Any) -> Call:
        q, k_cache, v_cache, block_table, seqused_k, *_ = inputs
        num_seqs, (heads, head_dim) = seqused_k.shape[0], q.shape[1:]
        page_size, kv_heads = k_cache.shape[1:3]
        splits = torch.empty(num_seqs, dtype=torch.int32, device=q.device)
        num_sms = torch.cuda.get_device_properties(q.device).multi_processor_count
        count_splits[(1,)](
            splits, seqused_k, num_seqs, 1, heads, kv_heads, most_splits, num_sms,
            MAX_NUM_SEQ=256,
        )  # fmt: skip
        partial = q.new_empty(num_seqs, heads, most_splits, head_dim, dtype=torch.float32)
        lse = q.new_empty(num_seqs, heads, most_splits, dtype=torch.float32)
        lens = seqused_k.tolist()
        indptr = torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device=q.device)
        slot = torch.arange(page_size, device=q.device)
        slots = torch.cat(
            [
                (row.long()[:, None] * page_size + slot).flatten()[:n]
                for row, n in zip(block_table, lens, strict=True)
            ]
        )
        k, v = (cache.flatten(0, 1) for cache in (k_cache, v_cache))
        out = torch.empty_like(q)

        def call() -> Tensor:
            attend(
                q, k, v, out, indptr, slots, partial, lse, splits, most_splits, head_dim**-0.5,
                1.0, 1.0,
            )  # fmt: skip
            return out

        return call

    return {"sglang-triton": Peer(prepare, needs=_PLAIN)}
