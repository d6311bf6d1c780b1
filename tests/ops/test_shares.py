"""Equal shares of a decode: the rules of the device are those in Python."""

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from echokernels._target import INTERPRETED
from echokernels.attention._shares import cut, cuts_within, holder, line_up, tiles_of
from echokernels.attention.split import pieces_of, share_cuts

BLOCK_N = 16


@triton.jit
def _write_plan_kernel(
    cuts_ptr,  # i32[most_shares + 1]
    counts_ptr,  # i32[num_seqs]
    seqused_k_ptr,
    cu_seqlens_q_ptr,
    num_seqs,
    most_shares,
    window_left,
    HAS_LEFT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
):
    tiles = tiles_of(
        seqused_k_ptr, cu_seqlens_q_ptr, num_seqs, window_left, HAS_LEFT, BLOCK_N, BLOCK_SEQS
    )
    total, size, larger, near = line_up(tiles, most_shares)
    end = tl.cumsum(tiles, axis=0)
    for share in range(most_shares + 1):
        at = cut(num_seqs * 0 + share, end, total, size, larger, near)
        tl.store(cuts_ptr + share, at)
    for seq in range(num_seqs):
        tl.store(counts_ptr + seq, 1)
        own = tl.arange(0, BLOCK_SEQS) == seq
        if tl.sum(tl.where(own, tiles, 0)) > 0:
            _, first, last = holder(tl.sum(tl.where(own, end, 0)) - 1, end)
            low, high = cuts_within(first, last, size, larger, near)
            tl.store(counts_ptr + seq, 1 + tl.maximum(high - low + 1, 0))


def plan(device, k_lens, most_shares, q_lens=None, window_left=-1):
    """(where shares begin, how many pieces each sequence has) by the device's rules."""
    cuts = torch.full((most_shares + 1,), -1, dtype=torch.int32, device=device)
    counts = torch.full((len(k_lens),), -1, dtype=torch.int32, device=device)
    boundaries = None
    if q_lens is not None:
        boundaries = torch.tensor([0, *q_lens], device=device).cumsum(0).int()
    _write_plan_kernel[(1,)](
        cuts, counts, torch.tensor(k_lens, dtype=torch.int32, device=device), boundaries,
        len(k_lens), most_shares, window_left,
        HAS_LEFT=window_left >= 0, BLOCK_N=BLOCK_N,
        BLOCK_SEQS=triton.next_power_of_2(len(k_lens)),
    )  # fmt: skip
    return cuts.tolist(), counts.tolist()


def tiles_in_python(k_lens, q_lens, window_left):
    tiles = []
    for k_len, q_len in zip(k_lens, q_lens, strict=True):
        first = max(0, k_len - q_len - window_left) // BLOCK_N if window_left >= 0 else 0
        tiles.append(-(-k_len // BLOCK_N) - first)
    return tiles


@given(
    k_lens=st.lists(st.sampled_from([0, 1, 15, 16, 17, 100, 1000, 5000]), min_size=1, max_size=40)
    | st.builds(lambda n, count: [n] * count, st.integers(0, 5000), st.integers(1, 40)),
    most_shares=st.integers(1, 70),
    q_len=st.sampled_from([None, 1, 5]),
    window_left=st.sampled_from([-1, 0, 40, 700]),
)
def test_the_rules_in_python_are_those_of_the_device(
    device, k_lens, most_shares, q_len, window_left
):
    if device.type == "cpu" and not INTERPRETED:
        pytest.skip("on the CPU kernels run in the interpreter")
    q_lens = None if q_len is None else [q_len] * len(k_lens)
    cuts, counts = plan(device, k_lens, most_shares, q_lens, window_left)
    tiles = tiles_in_python(k_lens, q_lens or [1] * len(k_lens), window_left)
    want = share_cuts(tiles, most_shares)
    # What has no share begins at the end of all.
    assert cuts == want + [sum(tiles)] * (len(cuts) - len(want))
    assert counts == pieces_of(tiles, most_shares)
