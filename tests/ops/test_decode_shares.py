"""Shares of the Hopper decode: what the rules promise, and that the device has the same."""

from itertools import accumulate, pairwise

import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from echokernels import attention_workspace_size
from echokernels._target import KNOWN_TARGETS, assume
from echokernels.attention import decode_hopper
from echokernels.attention._decode_config import decode_config
from echokernels.attention._hopper_shares import DecodeCall, DecodeShape, share_of_program
from echokernels.attention.decode_hopper import default_sharing
from echokernels.attention.split import (
    MOST_SHARED_ROWS,
    MOST_SHARES_PER_SM,
    num_shares,
    pieces_of,
    share_cuts,
)

TILES = st.lists(st.integers(0, 3000), min_size=1, max_size=60) | st.builds(
    lambda number, count: [number] * count, st.integers(0, 3000), st.integers(1, 300)
)


@given(tiles=TILES, most_shares=st.integers(1, 600))
def test_shares_are_about_equal(tiles, most_shares):
    cuts = share_cuts(tiles, most_shares)
    assert len(cuts) - 1 <= most_shares
    assert (cuts[0], cuts[-1]) == (0, sum(tiles))
    size = sum(tiles) / (len(cuts) - 1)
    # Each edge moves by an eighth at most.
    assert all(0 <= end - begin <= size + 1 + size / 4 for begin, end in pairwise(cuts))


@given(length=st.integers(1, 600), shares=st.integers(1, 300), each=st.integers(1, 9))
def test_sequences_of_one_length_stay_whole_if_they_fit(length, shares, each):
    tiles = [length] * (shares * each)
    assert pieces_of(tiles, shares) == [1] * len(tiles)
    assert [end - begin for begin, end in pairwise(share_cuts(tiles, shares))] == [
        length * each
    ] * shares


@pytest.mark.parametrize("num_seqs", [34, 36, 40, 50, 67, 100])
def test_others_of_one_length_are_cut_so_that_no_share_is_much_larger(num_seqs):
    cuts = share_cuts([128] * num_seqs, 33)
    assert max(end - begin for begin, end in pairwise(cuts)) <= 1.26 * 128 * num_seqs / 33


@given(tiles=TILES, most_shares=st.integers(1, 600))
def test_a_share_has_at_most_two_pieces(tiles, most_shares):
    cuts = share_cuts(tiles, most_shares)
    ends = [*accumulate(tiles)]
    for begin, end in pairwise(cuts):
        cut_up = [
            (first, last)
            for first, last in zip([0, *ends], ends, strict=False)
            if max(first, begin) < min(last, end) and not begin <= first <= last <= end
        ]
        assert len(cut_up) <= 2
        assert sum(first < begin for first, _ in cut_up) <= 1
        assert sum(last > end for _, last in cut_up) <= 1


def test_pieces_follow_the_lengths():
    # Short sequences are not cut up, long ones fill the device.
    assert pieces_of([16] * 256, 33) == [1] * 256
    assert pieces_of([32] * 64, 33) == [1] * 64
    assert pieces_of([1], 16) == [1]
    assert pieces_of([0, 0], 16) == [1, 1]
    assert pieces_of([2048], 33) == [33]
    assert pieces_of([64] * 8, 16) == [2] * 8
    # Within one batch the count follows the length.
    counts = pieces_of([8, 64, 512, 4096], 66)
    assert counts == sorted(counts)
    assert (counts[0], counts[-1] > 40) == (1, True)
    # Batch 12, 32k keys, one KV head (vllm#48076, sglang#21775, flash-attention#2445).
    assert sum(pieces_of([512] * 12, 264)) >= 264


def test_the_default_follows_the_amount_of_work():
    assert default_sharing(is_large=False) == (64, 1)
    assert default_sharing(is_large=True) == (64, 2)


@given(
    kv_heads=st.sampled_from([1, 2, 5, 8, 16, 128, 300]),
    group=st.sampled_from([1, 3, 4, 8, 40]),
    max_tokens=st.integers(1, 2000),
    query_len=st.integers(1, 16),
    head_dim=st.sampled_from([64, 128, 256]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    per_sm=st.integers(1, MOST_SHARES_PER_SM),
    target=st.sampled_from([*KNOWN_TARGETS.values()]),
)
def test_pieces_fit_the_promised_workspace(
    kv_heads, group, max_tokens, query_len, head_dim, dtype, per_sm, target
):
    """Of both kernels, also where the longest query is longer than what there are tokens for."""
    queries = min(query_len, max_tokens)
    with assume(target):
        size = attention_workspace_size(1024, max_tokens, kv_heads * group, kv_heads, head_dim)
        config, num_tiles = decode_config(head_dim, dtype, group, queries, False, target)
    rows = group * queries
    for tiles, tile in ((num_tiles, min(config.block_m, rows)), (1, rows)):
        if tiles > 1 or rows <= MOST_SHARED_ROWS:
            shares = num_shares(kv_heads * tiles, per_sm, target.num_sms)
            assert shares * 2 * kv_heads * tiles * tile * (head_dim + 1) * 4 <= size


@pytest.mark.parametrize("num_tokens", [1, 3, 8])
def test_rows_are_no_more_than_there_are_tokens_for(num_tokens):
    q = torch.empty(num_tokens, 8, 64, device="meta")
    assert decode_hopper._rows(q, 2, 5) == 4 * min(num_tokens, 5)


@gluon.jit(do_not_specialize=["num_seqs", "kv_heads", "window_left"])
def _write_shares_kernel(
    out_ptr,  # i32[programs, 4]: sequence, tile of it, tile of all, tiles
    seqused_k_ptr,
    cu_seqlens_q_ptr,
    num_seqs,
    kv_heads,
    window_left,
    zero,
    one,
    S: gl.constexpr,
    BLOCK_SEQS: gl.constexpr,
):
    lens = seqused_k_ptr
    call = DecodeCall(
        num_seqs, kv_heads, one, window_left, zero, one, one, lens, zero, zero, lens,
        cu_seqlens_q_ptr if S.has_boundaries else lens, lens, zero, lens, zero, lens, lens, zero,
        zero, lens, zero, zero, lens, lens, lens, S,
    )  # fmt: skip
    _, seq, tile, at, left, _ = share_of_program(call, BLOCK_SEQS)
    ptr = out_ptr + gl.program_id(0) * 4
    gl.store(ptr, seq)
    gl.store(ptr + 1, tile)
    gl.store(ptr + 2, at)
    gl.store(ptr + 3, left)


def shape_of(q_len, window_left):
    return DecodeShape(
        head_dim=64, block_d=64, block_n=64, slots=2, group=1, most_rows=1,
        page_size=16, has_copies=False, has_codes=False, has_boundaries=q_len is not None,
        has_left=window_left >= 0, has_right=True, has_softcap=False, has_alibi=False,
        has_sinks=False, has_lse=False,
    )  # fmt: skip


def shares_of_device(device, k_lens, programs, kv_heads, q_len, window_left):
    shape = shape_of(q_len, window_left)
    out = torch.full((programs, 4), -1, dtype=torch.int32, device=device)
    boundaries = None
    if q_len is not None:
        boundaries = torch.arange(len(k_lens) + 1, dtype=torch.int32, device=device) * q_len
    _write_shares_kernel[(programs,)](
        out, torch.tensor(k_lens, dtype=torch.int32, device=device), boundaries, len(k_lens),
        kv_heads, window_left, 0, 1.0, S=shape, BLOCK_SEQS=triton.next_power_of_2(len(k_lens)),
    )  # fmt: skip
    return out.tolist()


@pytest.mark.gpu
@given(
    k_lens=st.lists(st.sampled_from([0, 1, 63, 64, 65, 700, 5000]), min_size=1, max_size=40)
    | st.builds(lambda n, count: [n] * count, st.integers(0, 5000), st.integers(1, 300)),
    shares=st.integers(1, 70),
    kv_heads=st.sampled_from([1, 3]),
    q_len=st.sampled_from([None, 1, 5]),
    window_left=st.sampled_from([-1, 0, 700]),
)
def test_the_device_has_the_same_shares(cuda, k_lens, shares, kv_heads, q_len, window_left):
    tiles = []
    for k_len in k_lens:
        first = max(0, k_len - (q_len or 1) - window_left) // 64 if window_left >= 0 else 0
        tiles.append(-(-k_len // 64) - first)
    cuts = share_cuts(tiles, shares)
    ends = [*accumulate(tiles)]
    rows = shares_of_device(cuda, k_lens, shares * kv_heads, kv_heads, q_len, window_left)
    for program, (seq, tile, at, left) in enumerate(rows):
        share = program // kv_heads
        if share + 1 >= len(cuts) or cuts[share] == cuts[share + 1]:
            assert left == 0
            continue
        assert (at, at + left) == (cuts[share], cuts[share + 1])
        assert ends[seq] - tiles[seq] + tile == at
        assert 0 <= tile < tiles[seq]
