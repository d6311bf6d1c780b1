"""How many pages the KV cache gets."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from echokernels._target import INTERPRETED, KNOWN_TARGETS, assume
from echokernels.runtime import LLM, model_runner
from echokernels.runtime.cache_memory import (
    allocate_caches,
    cache_place,
    page_bytes,
    pages_within,
)
from echokernels.runtime.config import EngineConfig, ModelConfig
from echokernels.runtime.layers import Placement
from tests.tiny_llama import TINY, save, tiny_llama

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
# The same of 16 codes of a byte and a scale of 4.
CODES_PAGE_BYTES = 2 * 3 * 16 * 2 * (16 + 4)
CPU = torch.device("cpu")


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


@pytest.mark.parametrize("code", [torch.int8, torch.float8_e4m3fn])
def test_the_scales_of_codes_count(code: torch.dtype) -> None:
    config = EngineConfig()
    assert pages_within(10 * CODES_PAGE_BYTES - 1, MODEL, config, code) == 9
    assert pages_within(10 * CODES_PAGE_BYTES, MODEL, config, code) == 10
    with pytest.raises(ValueError, match=f"page of {CODES_PAGE_BYTES} bytes"):
        pages_within(CODES_PAGE_BYTES - 1, MODEL, config, code)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_codes_fit_2d_by_d_plus_4_times_the_tokens_of_16_bits(head_dim: int) -> None:
    model = dataclasses.replace(MODEL, head_dim=head_dim)
    sizes = {dtype: page_bytes(model, 16, dtype) for dtype in (torch.bfloat16, torch.int8)}
    # Room that holds a whole number of either kind of page.
    room = sizes[torch.bfloat16] * sizes[torch.int8]
    config = EngineConfig(max_num_seqs=room)
    bf16, int8 = (pages_within(room, model, config, dtype) for dtype in sizes)
    assert int8 * (head_dim + 4) == bf16 * 2 * head_dim
    assert round(int8 / bf16, 2) == {64: 1.88, 128: 1.94}[head_dim]


def test_the_caches_take_what_was_counted() -> None:
    caches = allocate_caches(MODEL, 5, 16, Placement(torch.float16, CPU))
    assert len(caches) == 3
    assert {tensor.shape for cache in caches for tensor in cache[:2]} == {(5, 16, 2, 16)}
    assert {scale for cache in caches for scale in cache[2:]} == {None}
    assert sum(tensor.nbytes for cache in caches for tensor in cache[:2]) == 5 * PAGE_BYTES


@pytest.mark.parametrize("code", [torch.int8, torch.float8_e4m3fn])
def test_caches_of_codes_take_what_was_counted(code: torch.dtype) -> None:
    caches = allocate_caches(MODEL, 5, 16, Placement(code, CPU))
    assert len(caches) == 3
    tensors = [tensor for cache in caches for tensor in cache if tensor is not None]
    codes, scales = ([t for t in tensors if t.dim() == dim] for dim in (4, 3))
    assert {(t.dtype, t.shape) for t in codes} == {(code, (5, 16, 2, 16))}
    assert {(t.dtype, t.shape) for t in scales} == {(torch.float32, (5, 16, 2))}
    assert sum(t.nbytes for t in tensors) == 5 * CODES_PAGE_BYTES
    assert len({t.data_ptr() for t in tensors}) == 3 * 4, "memory is shared"


@pytest.mark.skipif(INTERPRETED, reason="loads models")
@pytest.mark.parametrize(
    ("kv_cache_dtype", "head_bytes"), [("auto", 16 * 2), ("int8", 16 + 4), ("fp8", 16 + 4)]
)
def test_an_engine_gets_the_pages_that_its_memory_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv_cache_dtype: str, head_bytes: int
) -> None:
    monkeypatch.setattr(model_runner, "CPU_CACHE_BYTES", 1 << 20)
    folder = save(tiny_llama(), tmp_path)
    llm = LLM(folder, device="cpu", dtype="bfloat16", kv_cache_dtype=kv_cache_dtype)
    heads = 2 * 16 * TINY["num_hidden_layers"] * TINY["num_key_value_heads"]
    assert llm.engine.stats().num_pages == (1 << 20) // (heads * head_bytes)


def test_fp8_is_refused_where_a_gpu_has_no_casts_to_it() -> None:
    place = Placement(torch.bfloat16, torch.device("cuda", 0))
    with assume(KNOWN_TARGETS["sm_80"]):
        assert cache_place("int8", place).dtype == torch.int8
        with pytest.raises(ValueError, match=r"kv_cache_dtype is 'fp8', must be .* on sm_80: FP8"):
            cache_place("fp8", place)
    with assume(KNOWN_TARGETS["sm_90"]):
        assert cache_place("fp8", place) == place._replace(dtype=torch.float8_e4m3fn)
