"""The sets of ids that top-k, top-p and min-p leave to sample, at their edges."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from echokernels._launch import launch
from echokernels._target import INTERPRETED
from echokernels.sampling._keys import key_of, search
from echokernels.sampling._row import limits_count, load_tile
from echokernels.sampling._threshold import find_threshold
from echokernels.sampling.sample import sample
from tests.ops import sampling_oracle as oracle
from tests.ops.sampling_oracle import per_row
from tests.strategies import generator, poisoned, randn, seeds


def test_ties_with_the_last_id_are_kept(device):
    draws = 32
    logits = torch.tensor([3.0, 1.0, 0.0, 3.0, -0.0, 3.0], device=device).repeat(draws, 1)

    def drawn(**filters):
        return set(sample(logits, *per_row(device, draws, temperature=50.0, **filters)).tolist())

    assert drawn(top_k=1) == drawn(top_k=3) == drawn(top_p=0.0) == {0, 3, 5}
    assert drawn(min_p=1.0) == drawn(min_p=2.0) == {0, 3, 5}
    assert drawn(top_k=4) == {0, 1, 3, 5}
    assert drawn(top_k=5) == {0, 1, 2, 3, 4, 5}


@triton.jit
def _threshold_kernel(out_ptr, logits_ptr, vocab, top_k_ptr, top_p_ptr, BLOCK_N: tl.constexpr):
    row = tl.program_id(0)
    _, logit = load_tile(logits_ptr, 0, vocab, 1024)
    peak = tl.max(logit, axis=0)
    mass = tl.sum(tl.exp(logit - peak), axis=0)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    lowest = key_of(tl.full([], -3e38, tl.float32), 16)
    limited = limits_count(top_k, vocab)
    key = find_threshold(
        logits_ptr, vocab, peak, lowest, 1.0, limited, top_k, top_p, mass, 16, BLOCK_N
    )
    tl.store(out_ptr + row, key)


def test_thresholds_among_neighbouring_keys(device):
    if device.type == "cpu" and not INTERPRETED:
        pytest.skip("no kernel runs here")
    # The bf16 numbers from 1 to 5, all of them, and their negatives: off by one is another id.
    bits = torch.arange(0x3F80, 0x3F80 + 300)
    logits = torch.cat((bits, bits - 0x8000)).short().view(torch.bfloat16)
    logits = logits[torch.randperm(600, generator=generator(9))].to(device)
    filters = [(k, 1.0) for k in (1, 2, 3, 31, 128, 129, 300, 301, 599)]
    filters += [(0, p) for p in (0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 0.9999)] + [(200, 0.8)]
    top_k, top_p = (torch.tensor(column, device=device) for column in zip(*filters, strict=True))
    out = poisoned(len(filters), dtype=torch.int64, device=device)
    launch(_threshold_kernel, (len(filters),), out, logits, 600, top_k, top_p, BLOCK_N=128)
    values = logits.double().cpu().numpy()
    keys = logits.view(torch.int16).int().cpu().numpy()
    keys = np.where(keys < 0, keys ^ 0x7FFF, keys)
    for key, (k, p) in zip(out.tolist(), filters, strict=True):
        loose, tight = (
            oracle.allowed(oracle.Row(values, 1.0, k, p), margin) for margin in (1e-6, -1e-6)
        )
        kept = keys >= key
        assert np.array_equal(kept, loose) or np.array_equal(kept, tight)
        assert np.array_equal(loose, tight) or p == 0.9999


@triton.jit
def _search_kernel(out_ptr, keys_ptr, weights_ptr, low, high, target, slack, BLOCK_N: tl.constexpr):
    lane = tl.arange(0, BLOCK_N)
    key, weight = tl.load(keys_ptr + lane), tl.load(weights_ptr + lane)
    tl.store(out_ptr, search(key, weight, low, high, target, slack))


@given(
    spread=st.sampled_from([3, 100, 2**16, 2**31 - 1]), share=st.floats(0.01, 1.0),
    slack=st.sampled_from([1.0, 1.125]), seed=seeds,
)  # fmt: skip
def test_search_among_keys(device, spread, share, slack, seed):
    if device.type == "cpu" and not INTERPRETED:
        pytest.skip("no kernel runs here")
    gen = generator(seed)
    keys = torch.randint(-spread - 1, spread, (256,), generator=gen, dtype=torch.int32)
    weights = torch.randint(1, 9, (256,), generator=gen).float()
    target = max(share * float(weights.sum()), 1.0)
    low, high = int(keys.min()), int(keys.max()) + 1
    out = poisoned(1, dtype=torch.int32, device=device)
    launch(
        _search_kernel, (1,), out, keys.to(device), weights.to(device), low, high, target, slack,
        BLOCK_N=256,
    )  # fmt: skip
    above = float(weights[keys >= out.item()].sum())
    assert above >= target
    assert above <= slack * target or float(weights[keys > out.item()].sum()) < target


def test_top_k_beyond_a_tile_of_equal_logits(device):
    # All lanes reach 1 in the first tile, so 1 is where a search for up to 4,096 ids may begin.
    logits = torch.ones(16, 8192, device=device)
    logits[:, 4096:] = 0.0
    beyond = sample(logits, *per_row(device, 16, temperature=9.0, top_k=[4096, 4097] * 8)) >= 4096
    assert not beyond[::2].any()
    assert beyond[1::2].any()


def test_top_p_is_a_share_of_what_top_k_left(device):
    # 0.45 is more than half of what the top two have and less than half of all (mlx-lm#388).
    logits = torch.tensor([0.45, 0.35, 0.1, 0.1], device=device).log().repeat(16, 1)
    tokens = sample(logits, *per_row(device, 16, top_k=2, top_p=0.5))
    assert tokens.unique().tolist() == [0]


@pytest.mark.parametrize("top_p", [0.0, -1.0, 1e-30])
def test_top_p_of_zero_keeps_the_argmax(device, top_p):
    logits = randn(16, 1000, dtype=torch.float32, device=device, gen=generator(5))
    assert torch.equal(sample(logits, *per_row(device, 16, top_p=top_p)), logits.argmax(-1))


def test_top_p_of_one_and_top_k_of_the_vocabulary_keep_all(device):
    logits = torch.zeros(32, 5, device=device)
    for filters in ({"top_p": 1.0}, {"top_k": 5}, {"top_k": 0}, {"top_k": -1}, {"min_p": 0.0}):
        assert len(sample(logits, *per_row(device, 32, **filters)).unique()) == 5
