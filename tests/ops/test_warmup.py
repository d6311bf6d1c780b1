"""Which batches warm-up runs, and that it runs them all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echokernels import WarmupStep, warmup
from echokernels._warmup import warmup_steps
from echokernels.attention.split import block_seqs

limits = st.integers(1, 300)


@given(limits, limits, limits)
def test_steps_stay_within_the_limits(max_num_seqs, max_num_batched_tokens, max_model_len):
    for step in warmup_steps(max_num_seqs, max_num_batched_tokens, max_model_len):
        assert 1 <= len(step.query_lens) <= max_num_seqs
        assert sum(step.query_lens) <= max_num_batched_tokens
        assert all(1 <= query_len <= max_model_len for query_len in step.query_lens)
        assert 1 <= step.max_seqlen_k <= max_model_len


@given(limits, limits, limits)
def test_every_size_has_a_step_on_its_side_of_every_power_of_two(
    max_num_seqs, max_num_batched_tokens, max_model_len
):
    def bucket(size):  # (2^(i-1), 2^i), and each power of two alone
        return (size.bit_length(), size & (size - 1) == 0)

    steps = warmup_steps(max_num_seqs, max_num_batched_tokens, max_model_len)
    tokens = {bucket(sum(step.query_lens)) for step in steps}
    for size in range(1, min(max_num_batched_tokens, max_num_seqs * max_model_len) + 1):
        assert bucket(size) in tokens
    for table in (1, max_model_len):
        decodes = {
            bucket(len(step.query_lens))
            for step in steps
            if set(step.query_lens) == {1} and step.max_seqlen_k == table
        }
        for size in range(1, min(max_num_seqs, max_num_batched_tokens) + 1):
            assert bucket(size) in decodes
    chunks = {bucket(max(step.query_lens)) for step in steps}
    for size in range(1, min(max_num_batched_tokens, max_model_len) + 1):
        assert bucket(size) in chunks


@given(st.integers(1, 1024))
def test_decodes_meet_every_kernel_for_hopper(max_num_seqs):
    steps = warmup_steps(max_num_seqs, max_num_seqs, 64)
    met = {block_seqs(len(step.query_lens)) for step in steps if set(step.query_lens) == {1}}
    assert met == {block_seqs(num_seqs) for num_seqs in range(1, max_num_seqs + 1)}


def test_runs_every_step_and_shows_progress():
    steps, shown = [], []
    warmup(
        steps.append,
        max_num_seqs=2,
        max_num_batched_tokens=4,
        max_model_len=8,
        progress=lambda done, total: shown.append((done, total)),
    )
    assert steps == [
        WarmupStep((4,), 8), WarmupStep((3,), 8), WarmupStep((1, 1), 8), WarmupStep((1, 1), 1),
        WarmupStep((2,), 8), WarmupStep((1,), 8), WarmupStep((1,), 1),
    ]  # fmt: skip
    assert shown == [(done, 7) for done in range(8)]


def test_limits_below_one_are_refused():
    with pytest.raises(ValueError, match="max_model_len is 0, must be at least 1"):
        warmup(print, max_num_seqs=1, max_num_batched_tokens=1, max_model_len=0)
