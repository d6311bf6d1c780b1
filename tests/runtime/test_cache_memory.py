"""How many pages the KV cache gets."""

from __future__ import annotations

import pytest
import torch

from echokernels.runtime.cache_memory import allocate_caches, pages_within
from echokernels.runtime.config import EngineConfig, ModelConfig
from echokernels.runtime.layers import Placement

MODEL = ModelConfig(
    vocab_size=32,
    hidden_size=64,
    intermediate_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=100,
)
# K and V of 3 layers, 16 tokens, 2 heads of 16 values of 2 bytes.
PAGE_BYTES = 2 * 3 * 16 * 2 * 16 * 2


@pytest.mark.parametrize(
    ("num_bytes", "num_pages"),
    [
        (PAGE_BYTES, 1),
        (10 * PAGE_BYTES - 1, 9),
        (10 * PAGE_BYTES, 10),
        # 8 sequences of 100 tokens, 7 pages each: more would never be used.
        (1 << 40, 8 * 7),
    ],
)
def test_as_many_pages_as_fit_and_are_of_use(num_bytes: int, num_pages: int) -> None:
    config = EngineConfig(max_num_seqs=8)
    assert pages_within(num_bytes, MODEL, config, torch.float16) == num_pages


@pytest.mark.parametrize("num_bytes", [PAGE_BYTES - 1, -5])
def test_no_room_for_a_page(num_bytes: int) -> None:
    message = f"page of {PAGE_BYTES} bytes; {max(num_bytes, 0)} bytes are left"
    with pytest.raises(ValueError, match=message):
        pages_within(num_bytes, MODEL, EngineConfig(), torch.float16)


def test_the_caches_take_what_was_counted() -> None:
    caches = allocate_caches(MODEL, 5, 16, Placement(torch.float16, torch.device("cpu")))
    assert len(caches) == 3
    assert {tensor.shape for cache in caches for tensor in cache} == {(5, 16, 2, 16)}
    assert sum(tensor.nbytes for cache in caches for tensor in cache) == 5 * PAGE_BYTES
