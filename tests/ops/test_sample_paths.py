"""The ways of sample through a row: by slices, by a list of candidates, by the whole row."""

from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from echokernels._launch import launch
from echokernels._replay import bypass
from echokernels._target import INTERPRETED
from echokernels.sampling._candidates import find_floor
from echokernels.sampling._keys import search
from echokernels.sampling._row import limits_count
from echokernels.sampling.sample import _config, _group, sample
from tests.ops import sampling_oracle as oracle
from tests.ops.sampling_oracle import per_row, rows_of
from tests.strategies import generator, poisoned, randn, seeds, strided_randn

INF = float("inf")
SLICE = _config(2**24).block_n


def assert_accepted(logits, args, tokens=None):
    tokens = sample(logits, *args) if tokens is None else tokens
    for index, row in enumerate(rows_of(logits, args)):
        assert oracle.accepts(row, tokens[index].item()), f"row {index}"


def test_many_candidates(device):
    # 257 to 2,048 candidates; more; and more groups of 32 ids with candidates than are listed.
    vocab = 70_000
    logits = randn(1, vocab, dtype=torch.float32, device=device, gen=generator(1)).repeat(8, 1)
    args = per_row(
        device, 8, temperature=0.9, top_k=[300, 1024, vocab - 1, 0, 0, 0, 5000, 2000],
        top_p=[1.0, 0.95, 0.9, 0.9, 0.2, 1.0, 0.5, 1.0],
        min_p=[0.0, 0.0, 0.0, 0.0, 0.0, 0.05, 0.01, 0.3],
    )  # fmt: skip
    assert_accepted(logits, args)


@pytest.mark.parametrize(
    ("vocab", "value"), [(5000, 0.0), (5000, -3.4e38), (5000, INF), (70_000, 1.0)]
)
def test_all_logits_equal(device, vocab, value):
    logits = torch.full((6, vocab), value, device=device)
    args = per_row(
        device, 6, top_k=[0, 50, 1024, vocab - 1, 0, 50], top_p=[0.9, 1.0, 0.5, 0.1, 0.0, 0.5],
        min_p=[0.0, 0.0, 0.0, 0.0, 1.0, 0.1],
    )  # fmt: skip
    tokens = sample(logits, *args)
    # Ties with the last id kept are kept: no filter drops anything, and noise alone decides.
    assert torch.equal(tokens, sample(logits, *per_row(device, 6)))
    assert len(tokens.unique()) == 6


@pytest.mark.parametrize("vocab", [1, 5, 31, 33, SLICE - 1, SLICE, SLICE + 1, 2 * SLICE + 3])
def test_the_last_id_wins_wherever_slices_and_groups_end(device, vocab):
    logits = strided_randn(4, vocab, dtype=torch.bfloat16, device=device, gen=generator(2), pad=3)
    logits[:, -1] = 60.0
    args = per_row(
        device, 4, temperature=[0.0, 1.0, 1.0, 1.0], top_k=[0, 0, 2, 0], top_p=[1.0, 1.0, 1.0, 0.9]
    )
    logprobs = poisoned(4, dtype=torch.float32, device=device)
    assert sample(logits, *args, logprobs=logprobs).tolist() == [vocab - 1] * 4
    assert logprobs.abs().max() < 1e-6


def test_few_ids_above_minus_infinity(device):
    # A grammar's mask: most slices hold nothing, and there are fewer ids than top_k asks for.
    logits = torch.full((6, 3 * SLICE), -INF, device=device)
    logits[:, SLICE + 7 : SLICE + 10] = torch.tensor([0.5, 1.0, 0.2], device=device)
    logits[:, -1] = 0.4
    args = per_row(
        device, 6, top_k=[50, 0, 0, 0, 2000, 3], top_p=[1.0, 0.9, 1.0, 1.0, 0.9, 0.99],
        min_p=[0, 0, 0.01, 0, 0, 0],
    )  # fmt: skip
    assert_accepted(logits, args)


def test_scores_that_overflow(device):
    logits = torch.zeros(6, 5000, device=device)
    logits[:, ::2] = -3e38
    logits[:, 4096:] = 3e38
    args = per_row(
        device, 6, temperature=[1.0, INF, 1e38, 1.0, INF, 1e-30], top_k=[50, 3, 0, 2500, 0, 0],
        top_p=[1.0, 0.9, 0.5, 0.9, 0.01, 0.9],
    )  # fmt: skip
    tokens = sample(logits, *args)
    assert ((tokens >= 4096) | (args[0] >= 1e38)).all()


MIXED = {
    "temperature": [0.0, 0.8, 1.0, 1.3, 0.7, 1.0, 0.6, 1.0],
    "top_k": [0, 50, 0, 0, 3000, 0, 400, 1],
    "top_p": [1.0, 0.9, 1.0, 0.95, 0.99, 1.0, 1.0, 1.0],
    "min_p": [0.0, 0.0, 0.0, 0.0, 0.0, 0.1, 0.02, 0.0],
    "seeds": [1, 2, 3, 4, 5, 6, 7, 8],
    "positions": [0, 5, 2**33, 7, 8, 9, 10, 11],
}


@settings(max_examples=5)
@given(
    pad=st.sampled_from([0, 3]), scale=st.sampled_from([1.0, 5.0]), order=st.permutations(range(8)),
    seed=seeds,
)  # fmt: skip
def test_a34_rows_of_all_kinds_do_not_depend_on_each_other(device, pad, scale, order, seed):
    gen = generator(seed)
    logits = strided_randn(
        8, 9001, dtype=torch.bfloat16, device=device, gen=gen, pad=pad, scale=scale
    )
    args = per_row(device, 8, **MIXED)

    def run(rows):
        logprobs = poisoned(len(rows), dtype=torch.float32, device=device)
        tokens = sample(logits[rows], *(arg[rows] for arg in args), logprobs=logprobs)
        return list(zip(tokens.tolist(), logprobs.tolist(), strict=True))

    together = run(list(range(8)))
    assert run(order) == [together[row] for row in order]
    assert run(order[:1]) == [together[order[0]]]
    assert_accepted(
        logits[1:], [arg[1:] for arg in args], [torch.tensor(t) for t, _ in together][1:]
    )


def test_scratch_is_written_before_it_is_read(device):
    logits = randn(8, 9001, dtype=torch.bfloat16, device=device, gen=generator(4), scale=3.0)
    logits[:, :SLICE] = -INF  # a slice that has nothing to tell
    args = per_row(device, 8, **MIXED)
    want = sample(logits, *args)

    def poison(shape, dtype, device):
        return poisoned(*shape, dtype=dtype, device=device)

    with bypass(), mock.patch("echokernels.sampling.sample.scratch", poison):
        assert torch.equal(sample(logits, *args), want)


@triton.jit
def _search_kernel(out_ptr, low, high, target):
    key = tl.arange(0, 8)
    tl.store(out_ptr, search(key, tl.full([8], 1.0, tl.float32), low, high, target, 1.0))


@pytest.mark.parametrize(
    ("low", "high", "target", "found"),
    [
        (0, 8, 3.0, 5),  # 5, 6 and 7 weigh 3
        (0, 8, 9.0, 0),  # all weigh 8
        (-(2**31), 2**31 - 1, 1.0, 7),  # the distance overflows
        (6, 6, 3.0, 6),  # nothing between: it must end
        (9, 6, 3.0, 9),
    ],
)
def test_a_search_ends(device, low, high, target, found):
    if device.type == "cpu" and not INTERPRETED:
        pytest.skip("no kernel runs here")
    out = torch.zeros(1, dtype=torch.int32, device=device)
    launch(_search_kernel, (1,), out, low, high, target)
    assert out.item() == found


@triton.jit
def _floor_kernel(
    out_ptr, group_peaks_ptr, mass_ptr, num_groups, vocab, temperature_ptr, top_k_ptr, top_p_ptr,
    min_p_ptr, GROUPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    group = tl.arange(0, GROUPS)
    group_peak = tl.load(
        group_peaks_ptr + row * num_groups + group, mask=group < num_groups, other=float("-inf")
    )
    top_k = tl.load(top_k_ptr + row)
    floor = find_floor(
        group_peak, num_groups, tl.max(group_peak, axis=0), 1.0 / tl.load(temperature_ptr + row),
        limits_count(top_k, vocab), top_k, tl.load(top_p_ptr + row), tl.load(min_p_ptr + row),
        tl.load(mass_ptr + row), vocab, 0,
    )  # fmt: skip
    tl.store(out_ptr + row, floor)


@settings(max_examples=10)
@given(scale=st.sampled_from([0.0, 1.0, 3.0, 8.0]), whole=st.booleans(), seed=seeds)
def test_floor_is_under_all_that_is_kept_and_close(device, scale, whole, seed):
    if device.type == "cpu" and not INTERPRETED:
        pytest.skip("no kernel runs here")
    vocab = 40_000
    logits = randn(1, vocab, dtype=torch.float32, device=device, gen=generator(seed), scale=scale)
    logits = (logits.round() if whole else logits).repeat(8, 1)
    args = per_row(
        device, 8, temperature=[0.9, 0.9, 1.0, 1.0, 1.0, 2.0, 0.5, 1.0],
        top_k=[1, 50, 50, 0, 0, 0, 400, 5000], top_p=[1.0, 1.0, 0.9, 0.9, 0.5, 0.95, 0.3, 0.9],
        min_p=[0.0, 0.2, 0.2, 0.0, 0.1, 0.0, 0.0, 0.0],
    )  # fmt: skip
    group_peaks = logits.view(8, -1, _group(vocab)).amax(-1)
    mass = torch.exp((logits - logits.amax(-1, keepdim=True)) / args[0][:, None]).sum(-1)
    keys = poisoned(8, dtype=torch.int32, device=device)
    num_groups = group_peaks.shape[1]
    launch(
        _floor_kernel, (8,), keys, group_peaks, mass, num_groups, vocab, *args[:4],
        GROUPS=triton.next_power_of_2(num_groups), num_warps=8,
    )  # fmt: skip
    floors = torch.where(keys < 0, keys ^ 0x7FFFFFFF, keys).view(torch.float32)
    for floor, row in zip(floors.tolist(), rows_of(logits, args), strict=True):
        assert row.logits[oracle.allowed(row, -oracle.MARGIN)].min() >= floor
    if scale > 0 and not whole:
        near = (logits >= floors[:, None]).sum(-1).tolist()
        # As many ids share a bucket with one more likely as chance would have it.
        assert near[0] <= 2
        assert near[1] <= 70
        assert near[2] <= 70
