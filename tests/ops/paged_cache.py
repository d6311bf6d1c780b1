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


LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def quantised(
    cache: PagedCache, dtype: torch.dtype, gen: torch.Generator
) -> tuple[PagedCache, dict[str, torch.Tensor]]:
    """The cache in codes, and its scales by the names of the ops' arguments. Tokens differ in
    magnitude; what belongs to nobody has codes and NaN as its scale. `keys` and `values` are what
    codes and scales stand for, in float64. Scales are head-major or token-major, with gaps."""
    caches, scales, rows = [], {}, []
    for name, x in (("k_scale", cache.k_cache), ("v_scale", cache.v_cache)):
        num_pages, page_size, kv_heads = x.shape[:3]
        wide = poisoned(
            num_pages, kv_heads + 1, page_size + 3, dtype=torch.float32, device=x.device
        )
        if torch.rand((), generator=gen) < 0.5:
            wide = wide.transpose(1, 2).contiguous().transpose(1, 2)
        scale = wide[:, :kv_heads, :page_size].transpose(1, 2)
        exact = x.cpu().double()
        if name == "v_scale":
            exact = exact * 10 ** (4 * torch.rand(x.shape[:3], generator=gen) - 3)[..., None]
        scale.copy_((exact.abs().amax(-1) / LIMITS[dtype]).clamp_min(1e-12))
        codes = (exact / scale.cpu().double()[..., None]).nan_to_num(nan=100.0).float()
        codes = (codes.round() if dtype == torch.int8 else codes).to(dtype)
        caches.append(torch.empty_like(x, dtype=dtype).copy_(codes))
        scales[name] = scale
        pages = codes.double() * scale.cpu().double()[..., None]
        rows.append(
            [
                pages[table.cpu().long()].flatten(0, 1)[:length]
                for table, length in zip(cache.block_table, cache.seqused_k.tolist(), strict=True)
            ]
        )
    return PagedCache(*caches, cache.block_table, cache.seqused_k, *rows), scales


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
