"""Cases of an INT8 KV cache, codes with a scale for each token and KV head: written, and read by
prefill and decode. And of the same for rows of any tensor."""

from typing import Any

import torch
from torch import Tensor

import echokernels
from bench import formulas, inputs, prefill
from bench.case import Case, Inputs, Outputs, Peer, returning
from bench.checks import against
from bench.inputs import randn
from bench.peers import formula_peers
from bench.prefill import ATTENTION, BF16
from bench.suites import Decode, Prefill, Suite
from bench.timing import Call
from echokernels._path import forced_path

INT8, SCALE = 1, 4  # bytes
QUANTISED = 2.0**-7  # of codes: where rounding is to nearest, few are off, and those by 1
ROUNDED = 2.0**-8  # to bf16


def int8_rows(s: Suite) -> list[Case]:
    return [case(s, tokens) for case in (_quantize, _dequantize, _write) for tokens in s.tokens]


def _quantize(s: Suite, tokens: int) -> Case:
    return Case(
        "quantize_int8",
        f"T{tokens}",
        make=lambda d: (randn(d, tokens, s.kv_heads, s.head_dim),),
        run=echokernels.quantize_int8,
        check=against(formulas.quantize_int8),
        tolerance=QUANTISED,
        num_bytes=tokens * s.kv_heads * (s.head_dim * (BF16 + INT8) + SCALE),
        ceiling="copy",
        peers=formula_peers(formulas.quantize_int8, s.compile_modes),
    )


def _dequantize(s: Suite, tokens: int) -> Case:
    return Case(
        "dequantize_int8",
        f"T{tokens}",
        make=lambda d: formulas.quantize_int8(randn(d, tokens, s.kv_heads, s.head_dim)),
        run=echokernels.dequantize_int8,
        check=against(formulas.dequantize_int8),
        tolerance=ROUNDED,
        num_bytes=tokens * s.kv_heads * (s.head_dim * (BF16 + INT8) + SCALE),
        ceiling="copy",
        peers=formula_peers(formulas.dequantize_int8, s.compile_modes),
    )


def _write(s: Suite, tokens: int) -> Case:
    def make(device: torch.device) -> Inputs:
        key, value, *caches, slots = inputs.page_write(device, tokens, s.kv_heads, s.head_dim)
        codes = (torch.zeros_like(cache, dtype=torch.int8) for cache in caches)
        scales = (torch.zeros(cache.shape[:3], device=device) for cache in caches)
        return key, value, *codes, slots, *scales

    def run(*arguments: Tensor) -> Outputs:
        echokernels.reshape_and_cache(*arguments)
        _, _, k_cache, v_cache, _, k_scale, v_scale = arguments
        return k_cache, v_cache, k_scale, v_scale

    return Case(
        "reshape_and_cache_int8",
        f"T{tokens}",
        make=make,
        run=run,
        check=against(formulas.reshape_and_cache_int8),
        tolerance=QUANTISED,
        num_bytes=2 * tokens * s.kv_heads * (s.head_dim * (BF16 + INT8) + SCALE),
        ceiling="copy",
        peers=formula_peers(formulas.reshape_and_cache_int8, s.compile_modes),
    )


def prefills_int8(s: Suite) -> list[Case]:
    return [_prefill(s, prompts) for prompts in s.prefill if prompts.paged]


def _prefill(s: Suite, prompts: Prefill) -> Case:
    of_bf16 = prefill.case_of(s, prompts)

    def make(device: torch.device) -> Inputs:
        q, *caches, cu_seqlens_q, _, seqused_k, table, max_q, max_k, causal, window = of_bf16.make(
            device
        )
        (k, k_scale), (v, v_scale) = (quantised(cache) for cache in caches)
        rest = cu_seqlens_q, seqused_k, table, max_q, max_k, causal, window
        return q, k, v, k_scale, v_scale, *rest

    keys = sum(prompts.k_lens)
    saved = keys * s.kv_heads * (prompts.head_dim * (BF16 - INT8) - SCALE)
    return Case(
        "flash_attn_varlen_int8",
        of_bf16.name,
        make=make,
        run=_run_prefill,
        check=against(_exact_prefill),
        tolerance=ATTENTION,
        num_bytes=of_bf16.num_bytes - 2 * saved,
        num_flops=of_bf16.num_flops,
        ceiling="matmul",
        peers={
            "echo-bf16": Peer(_prefill_from_bf16),
            "echo-portable": Peer(returning(_run_prefill).prepare, lambda: forced_path("portable")),
        },
    )


def _run_prefill(
    q: Tensor, k: Tensor, v: Tensor, k_scale: Tensor, v_scale: Tensor, cu_seqlens_q: Tensor,
    seqused_k: Tensor, block_table: Tensor, max_seqlen_q: int, max_seqlen_k: int, causal: bool,
    window_left: int,
) -> Outputs:  # fmt: skip
    return echokernels.flash_attn_varlen(
        q, k, v, cu_seqlens_q, None, max_seqlen_q, max_seqlen_k, seqused_k=seqused_k,
        block_table=block_table, causal=causal, window=(window_left, -1), k_scale=k_scale,
        v_scale=v_scale,
    )  # fmt: skip


def _in_floats(k: Tensor, v: Tensor, k_scale: Tensor, v_scale: Tensor, dtype: torch.dtype) -> Any:
    return (_dequantised(*pair, dtype) for pair in ((k, k_scale), (v, v_scale)))


def _prefill_from_bf16(*arguments: Any) -> Call:
    """Our prefill from bf16 pages of the same tokens."""
    q, k, v, k_scale, v_scale, cu_seqlens_q, *rest = arguments
    k, v = _in_floats(k, v, k_scale, v_scale, q.dtype)
    return lambda: prefill.run(q, k, v, cu_seqlens_q, None, *rest)


def _exact_prefill(*arguments: Any) -> Tensor:
    q, k, v, k_scale, v_scale, cu_seqlens_q, *rest = arguments
    k, v = _in_floats(k, v, k_scale, v_scale, q.dtype)
    return prefill.exact(q, k, v, cu_seqlens_q, None, *rest)


def decodes_int8(s: Suite) -> list[Case]:
    return [_decode(contexts) for contexts in s.decode_int8]


def _decode(contexts: Decode) -> Case:
    lens, heads, head_dim = contexts.lens, contexts.heads, contexts.head_dim
    row = head_dim + SCALE
    return Case(
        "paged_attention_int8",
        contexts.full_name,
        make=lambda device: _contexts(device, contexts),
        run=_run_decode,
        check=against(_exact_decode),
        tolerance=ATTENTION,
        num_bytes=2 * (sum(lens) * contexts.kv_heads * row + len(lens) * heads * head_dim * BF16),
        num_flops=4 * sum(lens) * heads * head_dim,
        ceiling="read",
        peers={
            "echo-bf16": Peer(_decode_from_bf16),
            "echo-portable": Peer(returning(_run_decode).prepare, lambda: forced_path("portable")),
        },
    )


def _contexts(device: torch.device, contexts: Decode) -> Inputs:
    """The arguments of `_run_decode`."""
    q, *caches, block_table, seqused_k = inputs.contexts(
        device, list(contexts.lens), contexts.heads, contexts.kv_heads, contexts.head_dim, 1,
        contexts.page_size,
    )  # fmt: skip
    (k, k_scale), (v, v_scale) = (quantised(cache) for cache in caches)
    return q, k, v, block_table, seqused_k, k_scale, v_scale


def quantised(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Pages in INT8: (codes, scales)."""
    # Page by page: the whole cache in fp32 would not fit beside it.
    codes = torch.empty_like(cache, dtype=torch.int8)
    scale = torch.empty(cache.shape[:3], device=cache.device)
    for part, part_codes, part_scale in zip(
        cache.split(4096), codes.split(4096), scale.split(4096), strict=True
    ):
        of_part = formulas.quantize_int8(part)
        part_codes.copy_(of_part[0])
        part_scale.copy_(of_part[1])
    return codes, scale


def _dequantised(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty_like(codes, dtype=dtype)
    for part, part_codes, part_scale in zip(
        out.split(4096), codes.split(4096), scale.split(4096), strict=True
    ):
        part.copy_(part_codes * part_scale[..., None])
    return out


def _run_decode(
    q: Tensor, k: Tensor, v: Tensor, block_table: Tensor, seqused_k: Tensor, k_scale: Tensor,
    v_scale: Tensor,
) -> Outputs:  # fmt: skip
    return echokernels.paged_attention(
        q, k, v, block_table, seqused_k, k_scale=k_scale, v_scale=v_scale
    )


def _decode_from_bf16(*arguments: Any) -> Call:
    """Our decode of a bf16 cache of the same tokens."""
    q, k, v, block_table, seqused_k, k_scale, v_scale = arguments
    k, v = _in_floats(k, v, k_scale, v_scale, q.dtype)
    return lambda: echokernels.paged_attention(q, k, v, block_table, seqused_k)


def _exact_decode(*arguments: Any) -> Tensor:
    q, k, v, block_table, seqused_k, k_scale, v_scale = arguments
    sequences = zip(
        inputs.context_sequences(q, k, v, block_table, seqused_k),
        inputs.context_sequences(q, k_scale, v_scale, block_table, seqused_k),
        strict=True,
    )
    return torch.cat(
        [
            formulas.attention(query, k * k_scale[..., None], v * v_scale[..., None], True, -1)
            for (query, k, v), (_, k_scale, v_scale) in sequences
        ]
    )
