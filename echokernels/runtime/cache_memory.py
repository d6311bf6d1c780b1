"""How many pages the KV cache has, and their memory."""

from __future__ import annotations

import torch

from echokernels.runtime.config import EngineConfig, ModelConfig
from echokernels.runtime.layers import KVCache, Placement

CPU_CACHE_BYTES = 1 << 30


def allocate_caches(
    model: ModelConfig, num_pages: int, page_size: int, place: Placement
) -> list[KVCache]:
    """One pair of [num_pages, page_size, num_kv_heads, head_dim] for each layer, uninitialised."""
    shape = (num_pages, page_size, model.num_kv_heads, model.head_dim)
    return [
        KVCache(torch.empty(shape, **place._asdict()), torch.empty(shape, **place._asdict()))
        for _ in range(model.num_layers)
    ]


def pages_within(
    num_bytes: int, model: ModelConfig, config: EngineConfig, dtype: torch.dtype
) -> int:
    """As many pages as fit, up to what `max_num_seqs` sequences of `max_model_len` tokens need.

    Raises ValueError if not one fits.
    """
    head_bytes = model.head_dim * dtype.itemsize
    page_bytes = 2 * model.num_layers * config.page_size * model.num_kv_heads * head_bytes
    if num_bytes < page_bytes:
        raise ValueError(
            f"page_size is {config.page_size}, which makes a page of {page_bytes} bytes; "
            f"{max(num_bytes, 0)} bytes are left for the KV cache"
        )
    max_model_len = config.max_model_len or model.max_position_embeddings
    wanted = config.max_num_seqs * -(-max_model_len // config.page_size)
    return min(num_bytes // page_bytes, wanted)


def free_bytes(device: torch.device, utilization: float, activation_bytes: int) -> int:
    """GPU memory that the cache may take, `activation_bytes` kept for a step.

    1 - `utilization` of the whole memory stays free. What other processes hold is not free, so it
    is never planned with.
    """
    free, total = torch.cuda.mem_get_info(device)
    return int(free - (1 - utilization) * total) - activation_bytes
