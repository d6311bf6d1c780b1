"""Paged caches for tests: sequences scattered over pages, with NaN in every slot that belongs to
nobody."""

from dataclasses import dataclass

import torch

from tests.strategies import poisoned, randn


@dataclass(frozen=True)
class PagedCache:
    k_cache: torch.Tensor  # [num_pages, page_size, kv_heads, head_dim]
    v_cache: torch.Tensor
    block_table: torch.Tensor  # [num_seqs, max_pages]
    seqused_k: torch.Tensor  # [num_seqs]
    keys: list[torch.Tensor]  # each [k_len, kv_heads, head_dim]
    values: list[torch.Tensor]


def make_cache(
    k_lens: list[int],
    *,
    page_size: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    gen: torch.Generator,
    index_dtype: torch.dtype = torch.int32,
    head_major: bool = False,
    filler: float = float("nan"),
    spare_columns: int = 1,
) -> PagedCache:
    """Pages are taken in random order. Unused slots hold `filler`, and the tail of each table
    points at a page of them."""
    pages_of = [-(-n // page_size) for n in k_lens]
    num_pages = sum(pages_of) + 1
    order = torch.randperm(num_pages, generator=gen)
    unused, order = int(order[-1]), order[:-1]
    shape = (num_pages, page_size, kv_heads, head_dim)
    if head_major:
        shape = (num_pages, kv_heads, page_size, head_dim)
    k_cache = poisoned(*shape, dtype=dtype, device=device).nan_to_num(nan=filler)
    v_cache = k_cache.clone()
    if head_major:
        k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    table = torch.full((len(k_lens), max(pages_of, default=0) + spare_columns), unused)
    keys, values = [], []
    taken = 0
    for seq, n in enumerate(k_lens):
        pages = order[taken : taken + pages_of[seq]]
        taken += pages_of[seq]
        table[seq, : len(pages)] = pages
        for cache, rows in ((k_cache, keys), (v_cache, values)):
            new = randn(n, kv_heads, head_dim, dtype=dtype, device=device, gen=gen)
            for i in range(n):
                cache[int(pages[i // page_size]), i % page_size] = new[i]
            rows.append(new)
    return PagedCache(
        k_cache,
        v_cache,
        table.to(index_dtype).to(device),
        torch.tensor(k_lens, dtype=index_dtype, device=device),
        keys,
        values,
    )


def empty_cache(
    shape: tuple[int, int, int, int],  # num_pages, page_size, kv_heads, head_dim
    head_major: bool,
    pad: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache whose elements and surroundings are NaN, and the buffer that it is a view of."""
    num_pages, page_size, kv_heads, head_dim = shape
    inner = (kv_heads, page_size) if head_major else (page_size, kv_heads)
    # One page before and one after are guards; so are `pad` columns behind every head.
    buffer = poisoned(num_pages + 2, *inner, head_dim + pad, dtype=dtype, device=device)
    cache = buffer[1:-1, ..., :head_dim]
    return (cache.transpose(1, 2) if head_major else cache), buffer
