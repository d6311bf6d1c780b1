"""The ops in plain PyTorch: peers as they are and once compiled; on float64 inputs, the reference.

Arguments are those of the raw ops without the outputs. Nothing but pages is mutated.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn import functional

from bench.inputs import split_heads


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    total = _accumulable(x) + residual
    scale = torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)
    return (total * scale * weight).to(x.dtype), total.to(x.dtype)


def add_rms_norm_quant(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(int8 codes, scales, x + residual)"""
    total = _accumulable(x) + residual
    scale = torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)
    return *quantize_int8(total * scale * weight), total.to(x.dtype)


def silu_and_mul_quant(x: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = _accumulable(x).chunk(2, -1)
    return quantize_int8(functional.silu(gate) * up)


def silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return functional.silu(gate) * up


def gelu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return functional.gelu(gate) * up


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return functional.gelu(gate, approximate="tanh") * up


def rotary_embedding(
    positions: Tensor,  # i64[tokens]
    query: Tensor,  # [tokens, heads, head_dim]
    key: Tensor,  # [tokens, kv_heads, head_dim]
    cos_sin_cache: Tensor,  # f32[max_position, head_dim]
) -> tuple[Tensor, Tensor]:
    cos, sin = cos_sin_cache[positions][:, None].chunk(2, -1)

    def rotate(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)

    return rotate(query), rotate(key)


def reshape_and_cache(
    key: Tensor,  # [tokens, kv_heads, head_dim]
    value: Tensor,
    k_cache: Tensor,  # [num_pages, page_size, kv_heads, head_dim], mutated
    v_cache: Tensor,
    slot_mapping: Tensor,  # i64[tokens]
) -> tuple[Tensor, Tensor]:
    for cache, new in ((k_cache, key), (v_cache, value)):
        cache.flatten(0, 1).index_copy_(0, slot_mapping, new)
    return k_cache, v_cache


def quantize_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, scales) of rows."""
    y = _accumulable(x)
    scale = (y.abs().amax(-1) / 127).clamp_min(1e-12)
    return (y / scale[..., None]).round().to(torch.int8), scale


def dequantize_int8(codes: Tensor, scale: Tensor) -> Tensor:
    y = codes * scale[..., None]
    return y if y.dtype == torch.float64 else y.to(torch.bfloat16)


def reshape_and_cache_int8(
    key: Tensor,  # [tokens, kv_heads, head_dim]
    value: Tensor,
    k_cache: Tensor,  # i8[num_pages, page_size, kv_heads, head_dim], mutated
    v_cache: Tensor,
    slot_mapping: Tensor,  # i64[tokens]
    k_scale: Tensor,  # f32[num_pages, page_size, kv_heads], mutated
    v_scale: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (key, key_scale), (value, value_scale) = quantize_int8(key), quantize_int8(value)
    return (
        *reshape_and_cache(key, value, k_cache, v_cache, slot_mapping),
        *reshape_and_cache(key_scale, value_scale, k_scale, v_scale, slot_mapping),
    )


def fused_qk_norm_rope_cache(
    qkv: Tensor,  # [tokens, (heads + 2 * kv_heads) * head_dim]
    positions: Tensor,  # i64[tokens]
    cos_sin_cache: Tensor,  # f32[max_position, head_dim]
    q_weight: Tensor | None,  # [head_dim]; without norms both are None
    k_weight: Tensor | None,
    eps: float,
    k_cache: Tensor,  # [num_pages, page_size, kv_heads, head_dim], mutated
    v_cache: Tensor,
    slot_mapping: Tensor,  # i64[tokens]
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns what attention over the pages reads: the query and both caches."""
    query, key, value = split_heads(qkv, k_cache)
    if q_weight is not None and k_weight is not None:
        query, key = rms_norm(query, q_weight, eps), rms_norm(key, k_weight, eps)
    query, key = rotary_embedding(positions, query, key, cos_sin_cache)
    return query, *reshape_and_cache(key, value, k_cache, v_cache, slot_mapping)


def merge_attn_states(
    prefix_out: Tensor,  # [tokens, heads, head_dim]
    prefix_lse: Tensor,  # f32[heads, tokens]
    suffix_out: Tensor,
    suffix_lse: Tensor,
) -> tuple[Tensor, Tensor]:
    lse = torch.logaddexp(prefix_lse, suffix_lse)
    prefix_weight = (prefix_lse - lse).exp().T[..., None]
    suffix_weight = (suffix_lse - lse).exp().T[..., None]
    return (prefix_out * prefix_weight + suffix_out * suffix_weight).to(prefix_out.dtype), lse


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = True, window_left: int = -1
) -> Tensor:
    """Of one sequence. q: [queries, heads, head_dim]; k, v: [keys, kv_heads, head_dim].

    The last query stands at the last key; a window is of `window_left` keys before a query's own.
    Head by head: all the scores of a long prompt would not fit.
    """
    ones = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool, device=q.device)
    shift = k.shape[0] - q.shape[0]
    hidden = ones.triu(shift + 1) if causal else ~ones
    if window_left >= 0:
        hidden |= ones.tril(shift - window_left - 1)
    group = q.shape[1] // k.shape[1]
    out = torch.empty_like(q)
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // group].T / q.shape[-1] ** 0.5
        out[:, head] = scores.masked_fill_(hidden, -torch.inf).softmax(-1) @ v[:, head // group]
    return out


def attention_of(
    sequences: Callable[..., Iterable[tuple[Tensor, Tensor, Tensor]]],
) -> Callable[..., Tensor]:
    """`attention` of all the (q, k, v) that `sequences` finds in its arguments."""
    return lambda *inputs: torch.cat([attention(*qkv) for qkv in sequences(*inputs)])


def sample_temperature(logits: Tensor, temperature: Tensor, *_: Tensor) -> Tensor:
    return _draw((logits / temperature[:, None]).softmax(-1))


def sample_sorted(
    logits: Tensor,  # f32[rows, vocab]
    temperature: Tensor,  # f32[rows]
    top_k: Tensor,  # i32[rows], 0: all
    top_p: Tensor,  # f32[rows]
    *_: Tensor,
) -> Tensor:
    """Any k and p in each row."""
    logits, ids = logits.sort(-1, descending=True)
    probs = kept_probs(logits, temperature, top_k, top_p)
    return ids.gather(-1, _draw(probs)[:, None])[:, 0]


def sample_top_k(
    k: int, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, *_: Tensor
) -> Tensor:
    """One k, known on the host, in all rows."""
    logits, ids = logits.topk(k, -1)
    probs = kept_probs(logits, temperature, top_k, top_p)
    return ids.gather(-1, _draw(probs)[:, None])[:, 0]


def kept_probs(sorted_logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Probabilities after top-k, then top-p, of logits sorted from the largest. They sum to 1."""
    rank = torch.arange(sorted_logits.shape[-1], device=sorted_logits.device)
    dropped = (rank >= top_k[:, None]) & (top_k[:, None] > 0)
    scaled = (sorted_logits / temperature[:, None]).masked_fill(dropped, -torch.inf)
    probs = scaled.softmax(-1)
    beyond = probs.cumsum(-1) - probs >= top_p[:, None]
    return scaled.masked_fill(beyond, -torch.inf).softmax(-1)


def _draw(probs: Tensor) -> Tensor:
    # With e exponential, argmax(p / e) is distributed as p; torch.multinomial waits for the device.
    return (probs / torch.empty_like(probs).exponential_()).argmax(-1)


def _accumulable(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def topk_softmax(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    weights, ids = logits.softmax(-1).topk(k)
    return weights / weights.sum(-1, keepdim=True), ids


def route_and_align(logits: Tensor, k: int, block_size: int) -> Tensor:
    """Choices by expert, each expert's filled up to blocks with their number."""
    experts = topk_softmax(logits, k)[1].flatten()
    counts = experts.bincount(minlength=logits.shape[1])
    blocks = (counts + block_size - 1) // block_size
    order = experts.argsort(stable=True)
    gaps = (blocks * block_size - counts).cumsum(0) - (blocks * block_size - counts)
    places = torch.arange(len(order), device=logits.device) + gaps[experts[order]]
    sorted_ids = torch.full((int(blocks.sum()) * block_size,), len(order), device=logits.device)
    sorted_ids[places] = order
    return sorted_ids


def moe_permute(x: Tensor, ids: Tensor, num_experts: int) -> Tensor:  # noqa: ARG001
    return x[ids.flatten().argsort(stable=True) // ids.shape[1]]


def moe_unpermute(permuted: Tensor, source_rows: Tensor, weights: Tensor) -> Tensor:
    rows = permuted[source_rows.long()] * weights[..., None]
    return rows.sum(1).to(permuted.dtype)


def fused_moe(x: Tensor, w1: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Expert by expert, in the dtype of x."""
    out = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    for expert in ids.unique().tolist():
        token, place = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[token] @ w1[expert].to(x.dtype).T).chunk(2, -1)
        product = (functional.silu(gate) * up) @ w2[expert].to(x.dtype).T
        out.index_add_(0, token, product.to(out.dtype) * weights[token, place, None])
    return out.to(x.dtype)


def fused_moe_grouped(x: Tensor, w1: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """With PyTorch's grouped matrix product, on rows that are sorted by expert."""
    experts = ids.flatten().long()
    order = experts.argsort(stable=True)
    counts = torch.zeros(len(w1), dtype=torch.int32, device=x.device)
    ends = counts.scatter_add_(0, experts, torch.ones_like(experts, dtype=torch.int32)).cumsum(0)
    ends = ends.to(torch.int32)
    token = order // ids.shape[1]
    gate, up = torch._grouped_mm(x[token], w1.transpose(1, 2), offs=ends).chunk(2, -1)
    between = (functional.silu(gate) * up).contiguous()
    products = torch._grouped_mm(between, w2.transpose(1, 2), offs=ends)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    return out.index_add_(0, token, products * weights.flatten()[order, None]).to(x.dtype)
