"""How many splits a decode is launched for: the edges of the pure function."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echokernels.attention.split import (
    INVARIANT_SPLITS,
    MAX_QUERIES,
    MAX_SPLITS,
    choose_num_splits,
    most_split_rows,
)

H200_SMS = 132


def splits(batch, kv_heads, max_keys):
    return choose_num_splits(0, 0, batch * kv_heads, max_keys, H200_SMS)


def test_short_contexts_are_not_cut_up():
    assert splits(1, 8, 64) == 1
    assert splits(1, 8, 0) == 1


def test_one_long_sequence_in_a_large_batch_is_split():
    assert splits(256, 8, 1024) == 1
    assert splits(256, 8, 16_384) == 4
    assert splits(256, 8, 131_072) == 8


def test_batch_12_and_32k_and_mqa_fill_the_gpu():
    # Rules that look at the batch alone leave SMs idle here (vllm#48076, sglang#21775,
    # flash-attention#2445).
    for batch, kv_heads, keys in [(12, 8, 8192), (1, 8, 32_768), (1, 1, 131_072), (4, 1, 32_768)]:
        programs = splits(batch, kv_heads, keys) * batch * kv_heads
        assert programs >= min(2 * H200_SMS, batch * kv_heads * MAX_SPLITS)


def test_large_batches_are_hardly_split():
    assert splits(1024, 8, 4096) == 1


@pytest.mark.parametrize("num_splits", [1, 2, 500])
def test_a_given_count_is_taken(num_splits):
    assert choose_num_splits(num_splits, 0, 8, 4096, H200_SMS) == num_splits


@given(keys=st.integers(0, 200_000), size=st.integers(1, 4096), programs=st.integers(1, 10_000))
def test_invariant_splits_ignore_the_batch(keys, size, programs):
    count = choose_num_splits(0, size, programs, keys, H200_SMS)
    assert count == choose_num_splits(0, size, 1, keys, 8)
    assert 1 <= count <= INVARIANT_SPLITS
    # The chunks that the kernel makes of a full row fit in that many.
    chunk = max(size, -(-keys // INVARIANT_SPLITS))
    assert -(-keys // chunk) <= count or keys == 0


@given(
    seqs=st.integers(1, 300),
    queries=st.integers(1, MAX_QUERIES),
    kv_heads=st.sampled_from([1, 2, 8]),
    keys=st.integers(0, 200_000),
    sms=st.sampled_from([8, 108, 132]),
)
def test_the_workspace_bound_holds(seqs, queries, kv_heads, keys, sms):
    max_seqs, max_tokens = 300, 1000
    tokens = min(seqs * queries, max_tokens)
    rows = choose_num_splits(0, 0, seqs * kv_heads, keys, sms) * tokens
    assert rows <= most_split_rows(0, max_seqs, max_tokens, kv_heads, sms)
