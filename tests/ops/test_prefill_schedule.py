"""The work list of a ragged prefill: every tile once, the heaviest first."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echokernels._target import INTERPRETED
from echokernels.attention._prefill_schedule import schedule

needs_kernels = pytest.mark.skipif(
    not INTERPRETED, reason="on the CPU kernels run in the interpreter"
)


def boundaries(lengths, device, index):
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(index)


def tiles_of(q_lens, k_lens, block_m):
    """What a record of each tile should hold."""
    q_start = k_start = 0
    for seq, (q_len, k_len) in enumerate(zip(q_lens, k_lens, strict=True)):
        for first in range(0, q_len, block_m):
            yield (q_start + first, first, q_len, k_start, k_len, seq)
        q_start, k_start = q_start + q_len, k_start + k_len


def work_of(tile, block_m, block_n, window):
    """Key tiles that it sees, as the list orders by them."""
    _, first, q_len, _, k_len, _ = tile
    left, right = window
    end = k_len if right < 0 else min(k_len, first + block_m + k_len - q_len + right)
    most = 2**30 if left < 0 else (left + block_m + max(right, 0)) // block_n + 2
    return min(max(-(-max(end, 0) // block_n), 1), most)


@given(
    lens=st.lists(
        st.tuples(
            st.sampled_from([0, 1, 5, 63, 64, 65, 200, 700, 2300]),
            st.sampled_from([0, 0, 0, 30, 300, 5000, -3, -100]),
        ),
        min_size=1,
        max_size=70,
    ),
    blocks=st.sampled_from([(64, 64), (128, 128), (128, 64), (192, 128)]),
    window=st.sampled_from([(-1, -1), (-1, 0), (100, 0), (1000, 70), (64, -1)]),
    index=st.sampled_from([torch.int32, torch.int64]),
    used=st.booleans(),
)
def test_every_tile_once_the_heaviest_first(device, lens, blocks, window, index, used):
    if device.type == "cpu" and not INTERPRETED:
        pytest.skip("on the CPU kernels run in the interpreter")
    q_lens = [q for q, _ in lens]
    k_lens = [max(q + more, 0) for q, more in lens]
    records, count = schedule(
        boundaries(q_lens, device, index),
        None if used else boundaries(k_lens, device, index),
        torch.tensor(k_lens, device=device, dtype=index) if used else None,
        sum(q_lens),
        *blocks,
        window,
    )
    want = list(tiles_of(q_lens, k_lens, blocks[0]))
    if used:  # keys lie in pages
        want = [(*tile[:3], 0, *tile[4:]) for tile in want]
    assert count.item() == len(want) <= len(records)
    got = [tuple(record[:6]) for record in records[: len(want)].tolist()]
    assert sorted(got) == sorted(want)
    work = [work_of(tile, *blocks, window) for tile in got]
    assert work == sorted(work, reverse=True)
