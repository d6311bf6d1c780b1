"""The noise of sample: Philox, Gumbel, and that they make its draws follow softmax."""

import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from echokernels._launch import launch
from echokernels._target import INTERPRETED
from echokernels.sampling import reference
from echokernels.sampling._noise import gumbel, uniform_at, uniform_from
from echokernels.sampling.sample import sample
from tests.ops import sampling_oracle as oracle
from tests.ops.sampling_oracle import per_row
from tests.strategies import poisoned

# The interpreter takes some 30 ms a row.
DRAWS = 48 if INTERPRETED else 20_000


def test_philox_known_answers():
    # The test vectors that come with Random123, the authors' library.
    ones, pi = 0xFFFFFFFF, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    zeros = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert oracle.philox(0, (0, 0, 0, 0)) == zeros
    assert oracle.philox(2**64 - 1, (ones,) * 4) == [
        0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD,
    ]  # fmt: skip
    assert oracle.philox(0x299F31D0_A4093822, pi) == [
        0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1,
    ]  # fmt: skip
    keys = torch.tensor([0, -1, 2**63 - 1, -(2**63), 1234567890123456789])
    counters = torch.tensor(
        [[0, 1, 2**32 - 1, 37_984, 5], [0, 2**32 - 1, 7, 1, 2**31], [0, 3, 1, 0, 0]]
    )
    for i, words in enumerate(torch.stack(reference.philox(keys, *counters), 1).tolist()):
        assert words == oracle.philox(int(keys[i]), (*counters[:, i].tolist(), 0))


def test_noise_is_gumbel_far_into_its_tail():
    groups = torch.arange(2**20)
    noise = reference.gumbel(torch.full_like(groups, 5), groups * 0, groups, torch.float32)
    assert noise.isfinite().all()
    for threshold in (-2.0, 0.0, 3.0, 9.0, 12.0):
        expected = noise.numel() * -math.expm1(-math.exp(-threshold))
        assert int((noise > threshold).sum()) == pytest.approx(expected, abs=4 * expected**0.5)
    # With only 23 bits, a quarter of these would be equal.
    large = noise[noise > 9.0]
    assert large.unique().numel() > 0.99 * large.numel()


@triton.jit
def _noise_kernel(out_ptr, seed_ptr, position_ptr, BLOCK_N: tl.constexpr):
    seed, position, lane = tl.load(seed_ptr), tl.load(position_ptr), tl.arange(0, BLOCK_N)
    tl.store(out_ptr + lane, gumbel(uniform_from(seed, position, BLOCK_N, BLOCK_N)))
    tl.store(out_ptr + BLOCK_N + lane, gumbel(uniform_at(seed, position, BLOCK_N + lane)))


@pytest.mark.parametrize("position", [0, 131_071, 2**40 + 3])
@pytest.mark.parametrize("seed", [0, -1, 1234567890123456789])
def test_noise_of_the_kernel(device, seed, position):
    if device.type == "cpu" and not INTERPRETED:
        pytest.skip("no kernel runs here")
    block_n = 4096
    out = poisoned(2, block_n, dtype=torch.float32, device=device)
    scalars = (torch.tensor([value], device=device) for value in (seed, position))
    launch(_noise_kernel, (1,), out, *scalars, BLOCK_N=block_n)
    row = oracle.Row(np.zeros(2 * block_n), 1.0, seed=seed, position=position)
    for noise in out.cpu().numpy():
        np.testing.assert_allclose(noise, oracle.noise(row)[block_n:], rtol=0, atol=5e-6)


FILTERS = [{}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 4, "top_p": 0.8}]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_distribution_is_softmax_over_the_allowed_set(device, filters):
    logits = torch.tensor([0.5, 2.0, -1.0, 1.5, 1.0, 0.0], device=device)
    args = per_row(device, DRAWS, temperature=0.9, **filters)
    tokens = sample(logits.expand(DRAWS, 6).contiguous(), *args)
    row = oracle.Row(logits.double().cpu().numpy(), 0.9, **filters)
    keep = oracle.allowed(row)
    expected = np.exp(oracle.scores(row)) * keep
    expected *= DRAWS / expected.sum()
    counts = np.bincount(tokens.cpu().numpy(), minlength=6)
    assert counts[~keep].sum() == 0
    chi_square = ((counts - expected)[keep] ** 2 / expected[keep]).sum()
    # One in 10,000 of the distribution with 5 degrees of freedom, the most here; seeds are fixed.
    assert chi_square < 25.8


def test_rare_ids_have_their_share(device):
    # 511 ids of e^-9 each: one draw in 17 is decided by noise beyond 9.
    draws = 2000
    logits = torch.full((draws, 512), -9.0)
    logits[:, 77] = 0.0
    args = per_row("cpu", draws)
    want = torch.empty(draws, dtype=torch.int64)
    reference.sample(want, None, logits, *args)
    expected = draws * 511 * math.exp(-9) / (1 + 511 * math.exp(-9))
    rare = (want != 77).nonzero()[:, 0]
    assert len(rare) == pytest.approx(expected, abs=4 * expected**0.5)
    rare = rare[:16]
    got = sample(logits[rare].to(device), *(arg[rare].to(device) for arg in args))
    assert torch.equal(got.cpu(), want[rare])


def test_noise_differs_between_seeds_and_between_positions(device):
    # One seed for a whole batch with equal noise in each row was a bug elsewhere (vllm#50440).
    logits = torch.zeros(8, 1000, device=device)
    by_seed = sample(logits, *per_row(device, 8, seeds=[0, 1, 2, 3, 2**32, 2**33, -1, -(2**63)]))
    by_position = sample(logits, *per_row(device, 8, seeds=7, positions=list(range(8))))
    same = sample(logits, *per_row(device, 8, seeds=7, positions=3))
    assert by_seed.unique().numel() == by_position.unique().numel() == 8
    assert same.unique().tolist() == [by_position[3].item()]
