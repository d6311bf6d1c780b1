"""How many pages the KV cache has, and their memory."""

from __future__ import annotations

import torch

from echokernels._target import target_of
from echokernels.runtime.config import EngineConfig, ModelConfig
from echokernels.runtime.layers import KVCache, Placement

CPU_CACHE_BYTES = 1 << 30
CODE_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""Of caches that hold codes and scales, by `kv_cache_dtype`."""
SCALE_DTYPE = torch.float32


def cache_place(kv_cache_dtype: str, place: Placement) -> Placement:
    """Where the pages of a model at `place` live, and as what. Raises ValueError for a dtype that
    the GPU has no casts for."""
    dtype = CODE_DTYPES.get(kv_cache_dtype, place.dtype)
    is_fp8, device = dtype == torch.float8_e4m3fn, place.device
    if is_fp8 and device.type == "cuda" and not target_of(device).casts_to_fp8:
        raise ValueError(
            f"kv_cache_dtype is {kv_cache_dtype!r}, must be auto or int8 on "
            f"{target_of(device).name}: FP8 needs compute capability 8.9 or later"
        )
    return place._replace(dtype=dtype)


def allocate_caches(
    model: ModelConfig, num_pages: int, page_size: int, place: Placement
) -> list[KVCache]:
    """The pages of each layer, uninitialised; `place` has the dtype of the pages, and codes get
    scales."""
    heads = (num_pages, page_size, model.num_kv_heads)
    return [_allocate_layer(heads, model.head_dim, place) for _ in range(model.num_layers)]


def _allocate_layer(heads: tuple[int, int, int], head_dim: int, place: Placement) -> KVCache:
    k, v = (torch.empty((*heads, head_dim), **place._asdict()) for _ in range(2))
    if not _has_scales(place.dtype):
        return KVCache(k, v)
    scales = (torch.empty(heads, dtype=SCALE_DTYPE, device=place.device) for _ in range(2))
    return KVCache(k, v, *scales)


def _has_scales(dtype: torch.dtype) -> bool:
    return dtype in CODE_DTYPES.values()


def page_bytes(model: ModelConfig, page_size: int, dtype: torch.dtype) -> int:
    """Bytes of one page over all layers, K and V, in a cache of `dtype`; scales count."""
    head_bytes = model.head_dim * dtype.itemsize
    if _has_scales(dtype):
        head_bytes += SCALE_DTYPE.itemsize
    return 2 * model.num_layers * page_size * model.num_kv_heads * head_bytes


def pages_within(
    num_bytes: int, model: ModelConfig, config: EngineConfig, dtype: torch.dtype
) -> int:
    """As many pages of `dtype` as fit, up to what `max_num_seqs` sequences of `max_model_len`
    tokens need.

    Raises ValueError if not one fits.
    """
    of_page = page_bytes(model, config.page_size, dtype)
    if num_bytes < of_page:
        raise ValueError(
            f"page_size is {config.page_size}, which makes a page of {of_page} bytes; "
            f"{max(num_bytes, 0)} bytes are left for the KV cache"
        )
    max_model_len = config.max_model_len or model.max_position_embeddings
    wanted = config.max_num_seqs * -(-max_model_len // config.page_size)
    return min(num_bytes // of_page, wanted)


def free_bytes(device: torch.device, utilization: float, activation_bytes: int) -> int:
    """GPU memory that the cache may take, `activation_bytes` kept for a step.

    1 - `utilization` of the whole memory stays free. What other processes hold is not free, so it
    is never planned with.
    """
    free, total = torch.cuda.mem_get_info(device)
    return int(free - (1 - utilization) * total) - activation_bytes
