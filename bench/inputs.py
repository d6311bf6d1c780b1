"""Random inputs of the cases. Activations and caches are bf16, page tables and lengths int32."""

import math
import random
from collections.abc import Iterator

import torch

from bench.case import Inputs

Sequence = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""q [queries, heads, head_dim], k and v [keys, kv_heads, head_dim] of one sequence."""

PAGE_SIZE = 16


def randn(device: torch.device, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, device=device)


def rotary(device: torch.device, tokens: int, heads: int, kv_heads: int, head_dim: int) -> Inputs:
    """(positions, query, key, cos_sin_cache) of one prompt."""
    positions = torch.arange(tokens, device=device)
    inv_freq = 10_000.0 ** -torch.arange(0, 1, 2 / head_dim, device=device)
    angles = positions[:, None] * inv_freq
    query, key = (randn(device, tokens, h, head_dim) for h in (heads, kv_heads))
    return positions, query, key, torch.cat((angles.cos(), angles.sin()), -1)


def page_write(device: torch.device, tokens: int, kv_heads: int, head_dim: int) -> Inputs:
    """(key, value, k_cache, v_cache, slot_mapping): every second slot, in random order."""
    num_pages = 2 * math.ceil(tokens / PAGE_SIZE)
    key, value = (randn(device, tokens, kv_heads, head_dim) for _ in range(2))
    caches = _pages(device, num_pages, kv_heads, head_dim)
    slots = torch.randperm(num_pages * PAGE_SIZE, device=device)[:tokens]
    return key, value, *caches, slots


def projected(
    device: torch.device, tokens: int, heads: int, kv_heads: int, head_dim: int, eps: float
) -> Inputs:
    """(qkv, positions, cos_sin_cache, q_weight, k_weight, eps, k_cache, v_cache, slot_mapping)"""
    positions, _, _, table = rotary(device, tokens, heads, kv_heads, head_dim)
    qkv = randn(device, tokens, (heads + 2 * kv_heads) * head_dim)
    weights = randn(device, head_dim), randn(device, head_dim)
    caches_and_slots = page_write(device, tokens, kv_heads, head_dim)[2:]
    return qkv, positions, table, *weights, eps, *caches_and_slots


def split_heads(qkv: torch.Tensor, k_cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Views of `qkv`: query, key and value [tokens, heads, head_dim] for pages like `k_cache`."""
    kv_heads, head_dim = k_cache.shape[2:]
    heads = qkv.unflatten(-1, (-1, head_dim))
    return heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), 1)


def attention_states(device: torch.device, tokens: int, heads: int, head_dim: int) -> Inputs:
    """(prefix_out, prefix_lse, suffix_out, suffix_lse)"""
    prefix, suffix = (
        (randn(device, tokens, heads, head_dim), randn(device, heads, tokens, dtype=torch.float32))
        for _ in range(2)
    )
    return *prefix, *suffix


def contexts(
    device: torch.device,
    lengths: list[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    queries: int = 1,
    page_size: int = PAGE_SIZE,
) -> Inputs:
    """(q, k_cache, v_cache, block_table, seqused_k): contexts of `lengths`, on random pages."""
    num_pages = [math.ceil(length / page_size) for length in lengths]
    pages = torch.randperm(sum(num_pages), device=device).int().split(num_pages)
    block_table = torch.nn.utils.rnn.pad_sequence(list(pages), batch_first=True)
    seqused_k = torch.tensor(lengths, dtype=torch.int32, device=device)
    q = randn(device, len(lengths) * queries, heads, head_dim)
    caches = _pages(device, sum(num_pages), kv_heads, head_dim, page_size)
    return q, *caches, block_table, seqused_k


def sampling(
    device: torch.device,
    rows: int,
    vocab: int,
    temperature: float,
    top_k: int,
    top_p: float,
    dtype: torch.dtype = torch.float32,
) -> Inputs:
    """(logits, temperature, top_k, top_p, min_p, seeds, positions). `dtype` is of the logits."""

    def per_row(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device=device)

    # With a standard deviation of 4 a few tokens of 128,256 hold most of the probability.
    logits = 4 * randn(device, rows, vocab, dtype=dtype)
    seeds = torch.arange(rows, device=device)
    filters = per_row(top_k, torch.int32), per_row(top_p), per_row(0.0)
    return logits, per_row(temperature), *filters, seeds, per_row(0, torch.int64)


def context_sequences(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seqused_k: torch.Tensor,
    *_: object,
) -> Iterator[Sequence]:
    """The (q, k, v) of every sequence, gathered from what `contexts` made."""
    queries = q.chunk(seqused_k.shape[0])
    for query, pages, length in zip(queries, block_table, seqused_k.tolist(), strict=True):
        used = pages[: math.ceil(length / k_cache.shape[1])]
        k, v = (cache[used].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
        yield query, k, v


def ragged_lengths(num_seqs: int, low: int, high: int) -> list[int]:
    """Log-uniform in [low, high], the same in every run."""
    draw = random.Random(0)
    return [round(math.exp(draw.uniform(math.log(low), math.log(high)))) for _ in range(num_seqs)]


def _pages(
    device: torch.device, num_pages: int, kv_heads: int, head_dim: int, page_size: int = PAGE_SIZE
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (num_pages, page_size, kv_heads, head_dim)
    return randn(device, *shape), randn(device, *shape)
