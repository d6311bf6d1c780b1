"""Logits over KV caches of codes are those of the same arithmetic in plain PyTorch, in any chunks.

Every key is read from its page, so chunks change the order of fp32 sums and nothing else. These
differ in their last bits: now and then a value lies so near the border between two codes that it
takes the other one. So codes, and with them logits, are alike but for rounding, not to the bit:
they agree 20 times closer than codes agree with no codes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from echokernels._target import INTERPRETED
from echokernels.runtime.batch import pack_batch
from echokernels.runtime.cache_memory import allocate_caches, cache_place
from echokernels.runtime.layers import KVCache
from echokernels.runtime.loader import load_model
from echokernels.runtime.sampling_params import SamplingParams
from echokernels.runtime.scheduler import ScheduledBatch, ScheduledSequence
from echokernels.runtime.sequence import Sequence
from tests.quantised_llama import with_cache_of
from tests.tiny_llama import TINY, save, tiny_llama

pytestmark = pytest.mark.skipif(INTERPRETED, reason="minutes in the interpreter")

NUM_TOKENS = 200
PAGE_SIZE = 16
SLACK = 1e-3
"""RMS of the difference beside that of the logits. One code taken for its neighbour makes 1e-4,
quantisation itself 2e-2."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_llama(), tmp_path_factory.mktemp("llama"), tokenizer=False)


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_logits_in_any_chunks_are_those_of_plain_pytorch(
    folder: Path, device: torch.device, kv_cache_dtype: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(TINY["vocab_size"], (NUM_TOKENS,), generator=generator).tolist()
    ids = torch.tensor([token_ids])
    exact = tiny_llama()(ids).logits[0]
    expected = with_cache_of(tiny_llama(), kv_cache_dtype)(ids).logits[0]
    assert distance(exact, expected) > 10 * SLACK
    whole = our_logits(folder, device, token_ids, NUM_TOKENS, kv_cache_dtype)
    assert distance(whole, expected) <= SLACK
    for chunk in (64, 7, 1):
        chunked = our_logits(folder, device, token_ids, chunk, kv_cache_dtype)
        assert distance(chunked, expected) <= SLACK, f"chunks of {chunk}"
        assert distance(chunked, whole) <= SLACK, f"chunks of {chunk}"


def distance(logits: torch.Tensor, expected: torch.Tensor) -> float:
    difference = logits.double() - expected
    return float(difference.square().mean().sqrt() / expected.double().square().mean().sqrt())


def our_logits(
    folder: Path, device: torch.device, token_ids: list[int], chunk: int, kv_cache_dtype: str
) -> torch.Tensor:
    """Logits of all tokens, computed `chunk` at a time over pages that hold garbage before."""
    model, config, place = load_model(folder, "float32", device)
    num_pages = -(-len(token_ids) // PAGE_SIZE)
    caches = allocate_caches(config, num_pages, PAGE_SIZE, cache_place(kv_cache_dtype, place))
    for cache in caches:
        poison(cache)
    seq = Sequence("request", token_ids, SamplingParams())
    seq.block_table = list(range(num_pages))[::-1]
    logits = []
    for start in range(0, len(token_ids), chunk):
        count = min(chunk, len(token_ids) - start)
        batch = ScheduledBatch([ScheduledSequence(seq, start, count, samples=True)])
        inputs = pack_batch(batch, PAGE_SIZE, device)
        hidden = model(inputs.input_ids, inputs.positions, caches, inputs.attention)
        logits.append(model.compute_logits(hidden))
    return torch.cat(logits).cpu()


def poison(cache: KVCache) -> None:
    """Large codes, or NaN, under scales of NaN."""
    for codes, scale in ((cache.k, cache.k_scale), (cache.v, cache.v_scale)):
        assert scale is not None
        codes.view(torch.int8).fill_(127)
        scale.fill_(torch.nan)
