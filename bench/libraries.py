"""Kernels of other libraries as peers, by our op: FlashInfer, vLLM, SGLang, Liger.

None is a dependency: one that cannot be imported is reported once and left out. A peer gets the
inputs of our case; what it wants in another form is prepared outside the timing. What it returns
for its caller to keep, it allocates in the call, as ours does.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from bench import decode_peers, moe_peers
from bench.case import Case, Outputs, Peer, mutating, returning
from bench.inputs import split_heads
from bench.peers import four_kernels
from bench.timing import Call

ROUNDED_FIRST = 2.5e-2  # what is quantised was rounded to bf16: many codes are off by 1

_PACKED = frozenset({"packed"})  # keys and values that are not in pages
Kernels = Mapping[str, Mapping[str, Peer]]
"""By op, then by implementation."""


def load(device: torch.device, report: Callable[[str], object]) -> list[Kernels]:
    """The kernels of all libraries that are here. On a CPU there are none."""
    loaded = []
    for library in LIBRARIES if device.type == "cuda" else ():
        try:
            loaded.append(library())
        except Exception as failure:  # a package for another CUDA can fail in any way
            [line, *_] = str(failure).splitlines() or [""]
            report(f"{library.__name__[1:]} is left out: {type(failure).__name__}: {line}")
    return loaded


def with_peers(case: Case, libraries: Iterable[Kernels]) -> Case:
    """`case` with the peers that `libraries` have for its op."""
    peers = dict(case.peers)
    for kernels in libraries:
        of_op = kernels.get(case.op, {})
        peers |= {name: peer for name, peer in of_op.items() if peer.needs <= case.tags}
    return replace(case, peers=peers)


def _flashinfer() -> Kernels:
    activation, norm, rope = (
        import_module(f"flashinfer.{name}") for name in ("activation", "norm", "rope")
    )

    def add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Call:
        return mutating(norm.fused_add_rmsnorm, x, residual, weight, eps, outputs=(x, residual))

    def rotary(positions: Tensor, query: Tensor, key: Tensor, table: Tensor) -> Call:
        head_dim, flat = query.shape[-1], (query.flatten(1), key.flatten(1))
        apply = rope.apply_rope_with_cos_sin_cache_inplace
        return mutating(apply, positions.int(), *flat, head_dim, table, outputs=(query, key))

    def norm_into(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
        norm.rmsnorm(x, weight, eps, out=out)

    return {
        "rms_norm": {"flashinfer": returning(norm.rmsnorm)},
        "fused_add_rms_norm": {"flashinfer": Peer(add_norm)},
        "silu_and_mul": {"flashinfer": returning(activation.silu_and_mul)},
        "rotary_embedding": {"flashinfer": Peer(rotary)},
        "fused_qk_norm_rope_cache": {
            # Its own page write is told sequences instead of slots.
            "flashinfer-4-kernels": four_kernels(norm_into, rotary)
        },
        "flash_attn_varlen": {"flashinfer": Peer(_flashinfer_prefill, needs=_PACKED)},
        "paged_attention": decode_peers.flashinfer(),
    }


def _vllm() -> Kernels:
    import_module("vllm._C_stable_libtorch")
    ops = torch.ops._C

    def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        ops.rms_norm(out, x, weight, eps)
        return out

    def add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Call:
        return mutating(ops.fused_add_rms_norm, x, residual, weight, eps, outputs=(x, residual))

    def gated(op: Callable[..., object], x: Tensor) -> Tensor:
        out = x.new_empty(x.shape[0], x.shape[1] // 2)
        op(out, x)
        return out

    def add_norm_quant(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Outputs:
        codes, scale = _int8_rows(x)
        ops.rms_norm_dynamic_per_token_quant(codes, x, weight, scale, eps, None, residual)
        return codes, scale.flatten(), residual

    def gated_quant(x: Tensor) -> Outputs:
        activated = gated(ops.silu_and_mul, x)
        codes, scale = _int8_rows(activated)
        ops.dynamic_scaled_int8_quant(codes, activated, scale, None)
        return codes, scale.flatten()

    def rotary(positions: Tensor, query: Tensor, key: Tensor, table: Tensor) -> Call:
        rounded = table.to(query.dtype)  # as vLLM keeps it
        arguments = positions, query, key, query.shape[-1], rounded, True
        return mutating(ops.rotary_embedding, *arguments, outputs=(query, key))

    def page_write(key: Tensor, value: Tensor, *caches_and_slots: Tensor) -> Call:
        k_cache, v_cache, slots = caches_and_slots
        scale = torch.ones(1, device=key.device)  # unused, but not optional
        arguments = key, value, k_cache, v_cache, slots, "auto", scale, scale
        write = torch.ops._C_cache_ops.reshape_and_cache_flash
        return mutating(write, *arguments, outputs=(k_cache, v_cache))

    def fused(*inputs: Any) -> Call:
        qkv, positions, table, q_weight, k_weight, eps, k_cache, v_cache, slots = inputs
        query, key, value = split_heads(qkv, k_cache)
        heads, kv_heads, head_dim = query.shape[1], *key.shape[1:]
        cos, sin = (half.contiguous() for half in table.to(qkv.dtype).chunk(2, -1))

        def call() -> Outputs:
            q, k, v = (x.new_empty(x.shape[0], x[0].numel()) for x in (query, key, value))
            given = qkv, q_weight, k_weight, cos, sin, positions, slots
            sizes = head_dim, heads, kv_heads, head_dim // 2
            ops.fused_qknorm_rope_cache(q, k, v, *given, k_cache, v_cache, *sizes, eps, 0.0)
            return q.view(query.shape), k_cache, v_cache

        return call

    def fused_but_for_pages(*inputs: Any) -> Call:
        qkv, positions, table, q_weight, k_weight, eps, k_cache, v_cache, slots = inputs
        query, key, value = split_heads(qkv, k_cache)
        heads, kv_heads, head_dim = query.shape[1], *key.shape[1:]
        sizes = heads, kv_heads, kv_heads, head_dim
        rounded = table.to(qkv.dtype)
        write = page_write(key, value, k_cache, v_cache, slots)

        def call() -> Outputs:
            ops.fused_qk_norm_rope(qkv, *sizes, eps, q_weight, k_weight, rounded, True, positions)
            return query, *write()

        return call

    return {
        "rms_norm": {"vllm": returning(norm)},
        "fused_add_rms_norm": {"vllm": Peer(add_norm)},
        **{
            name: {"vllm": returning(partial(gated, getattr(ops, name)))}
            for name in ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul")
        },
        "rms_norm_quant": {"vllm": returning(add_norm_quant, ROUNDED_FIRST)},
        "silu_and_mul_quant": {"vllm-2-kernels": returning(gated_quant, ROUNDED_FIRST)},
        "rotary_embedding": {"vllm": Peer(rotary)},
        "reshape_and_cache": {"vllm": Peer(page_write)},
        "fused_qk_norm_rope_cache": {
            "vllm": Peer(fused),
            "vllm-2-kernels": Peer(fused_but_for_pages),
            "vllm-4-kernels": four_kernels(ops.rms_norm, rotary, page_write),
        },
    }


def _flashinfer_prefill(*inputs: Any) -> Call:
    q, k, v, cu_seqlens_q, cu_seqlens_k, _, _, _, _, causal, window_left = inputs
    memory = torch.empty(256 << 20, dtype=torch.uint8, device=q.device)
    prefill = import_module("flashinfer").BatchPrefillWithRaggedKVCacheWrapper
    wrapper = prefill(memory, "NHD", backend="fa3")
    wrapper.plan(
        cu_seqlens_q, cu_seqlens_k, q.shape[1], *k.shape[1:], causal=causal,
        window_left=window_left, q_data_type=q.dtype, kv_data_type=k.dtype,
    )  # fmt: skip
    out = torch.empty_like(q)
    return lambda: wrapper.run(q, k, v, out=out)


def _vllm_fa3() -> Kernels:
    flash_attn = import_module("vllm.vllm_flash_attn.flash_attn_interface")
    if not flash_attn.FA3_AVAILABLE:
        raise RuntimeError(flash_attn.FA3_UNAVAILABLE_REASON)

    def prefill(*inputs: Any) -> Call:
        q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, *options = inputs
        max_seqlen_q, max_seqlen_k, causal, window_left = options
        arguments = {
            "max_seqlen_q": max_seqlen_q, "cu_seqlens_q": cu_seqlens_q,
            "max_seqlen_k": max_seqlen_k, "cu_seqlens_k": cu_seqlens_k, "seqused_k": seqused_k,
            "block_table": block_table, "causal": causal, "fa_version": 3,
            "window_size": [window_left, 0 if causal and window_left >= 0 else -1],
        }  # fmt: skip
        out = torch.empty_like(q)
        return lambda: flash_attn.flash_attn_varlen_func(q, k, v, out=out, **arguments)

    return {
        "flash_attn_varlen": {"vllm-fa3": Peer(prefill)},
        "paged_attention": decode_peers.vllm_fa3(flash_attn),
    }


def _vllm_moe() -> Kernels:
    import_module("vllm._C_stable_libtorch")
    import_module("vllm._moe_C_stable_libtorch")
    ops = torch.ops._moe_C

    def route(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        weights = logits.new_empty(logits.shape[0], k, dtype=torch.float32)
        ids, rows = (torch.empty_like(weights, dtype=torch.int32) for _ in range(2))
        ops.topk_softmax(weights, ids, rows, logits, True, None, None)
        return weights, ids

    def align(ids: Tensor, experts: int, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
        size = min(ids.numel() + experts * (block_size - 1), ids.numel() * block_size)
        lengths = size, -(-size // block_size), 1
        sorted_ids, block_experts, num_padded = (ids.new_empty(n) for n in lengths)
        ops.moe_align_block_size(
            ids, experts, block_size, sorted_ids, block_experts, num_padded, None, None
        )
        return sorted_ids, block_experts, num_padded

    def route_and_align(logits: Tensor, k: int, block_size: int) -> Tensor:
        _, ids = route(logits, k)
        return align(ids, logits.shape[1], block_size)[0]

    return {
        "topk_softmax": {"vllm": returning(route)},
        "moe_align": {"vllm": returning(route_and_align)},
        "fused_moe": moe_peers.vllm(align),
    }


def _vllm_triton() -> Kernels:
    module = import_module("vllm.v1.attention.ops.triton_unified_attention")
    modes = import_module("vllm.v1.kv_cache_interface").KVQuantMode
    attend = module.unified_attention
    return {
        "paged_attention": decode_peers.vllm_triton(attend),
        "paged_attention_int8": decode_peers.vllm_triton_int8(attend, modes.INT8_PER_TOKEN_HEAD),
    }


def _sglang() -> Kernels:
    decode, metadata = (
        import_module(f"sglang.kernels.ops.attention.{name}")
        for name in ("decode_attention", "metadata")
    )
    attend, count_splits = decode.decode_attention_fwd, metadata.get_num_kv_splits_triton
    return {"paged_attention": decode_peers.sglang(attend, count_splits)}


def _fa3() -> Kernels:
    flash_attn = import_module("fa3_fwd_interface")

    def prefill(*inputs: Any) -> Call:
        q, k, v, *_, length, _, causal, window_left = inputs
        stacked = [x.unflatten(0, (-1, length)) for x in (q, k, v)]
        window = (window_left, 0 if causal and window_left >= 0 else -1)
        return lambda: flash_attn.flash_attn_func(*stacked, causal=causal, window_size=window)

    return {"flash_attn_varlen": {"fa3-dense": Peer(prefill, needs=frozenset({"dense"}))}}


def _liger() -> Kernels:
    add_rms_norm, rms_norm, rope, swiglu = (
        import_module(f"liger_kernel.ops.{name}")
        for name in ("fused_add_rms_norm", "rms_norm", "rope", "swiglu")
    )

    def norm(x: Tensor, weight: Tensor, eps: float) -> Outputs:
        return rms_norm.rms_norm_forward(x, weight, eps, 0.0, "llama", None)[0]

    def add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Outputs:
        forward = add_rms_norm.fused_add_rms_norm_forward
        return forward(x, residual, weight, eps, 0.0, "llama")[:2]

    def gated(x: Tensor) -> Call:
        gate, up = (half.contiguous() for half in x.chunk(2, -1))  # faster than its packed form
        return lambda: swiglu.swiglu_forward(gate, up)[-1]

    def rotary(positions: Tensor, query: Tensor, key: Tensor, table: Tensor) -> Call:
        halves = table[positions][None].to(query.dtype).chunk(2, -1)
        cos, sin = (torch.cat((half, half), -1) for half in halves)
        views = (x[None].transpose(1, 2) for x in (query, key))  # [1, heads, tokens, head_dim]
        return mutating(rope.rope_forward, *views, cos, sin, outputs=(query, key))

    return {
        "rms_norm": {"liger": returning(norm)},
        "fused_add_rms_norm": {"liger": returning(add_norm)},
        "silu_and_mul": {"liger": Peer(gated)},
        "rotary_embedding": {"liger": Peer(rotary)},
    }


def _int8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for codes like `x` and a scale for each row."""
    return torch.empty_like(x, dtype=torch.int8), torch.empty(x.shape[0], 1, device=x.device)


LIBRARIES = (_flashinfer, _vllm, _vllm_moe, _vllm_fa3, _vllm_triton, _sglang, _fa3, _liger)
