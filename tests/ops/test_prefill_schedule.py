"""The work list of a ragged prefill: every tile once, sequences with most keys first."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echokernels._target import INTERPRETED
from echokernels.attention._prefill_schedule import schedule


def boundaries(lengths, device, index):
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(index)


def records_of(q_lens, k_lens, *, paged, kv_heads, block_m, window, keys_in_l2):
    """What the list should hold."""
    seen = k_lens
    if min(window) >= 0:
        seen = [min(k_len, sum(window) + block_m) for k_len in k_lens]
    before = 0
    for seq in sorted(range(len(q_lens)), key=lambda seq: -seen[seq]):
        tiles = -(-q_lens[seq] // block_m)
        together = max(keys_in_l2 // max(seen[seq], 1), 1)
        together = -(-kv_heads // -(-kv_heads // together))  # as even as can be
        q_start, k_start = sum(q_lens[:seq]), 0 if paged else sum(k_lens[:seq])
        record = (before, tiles, q_start, q_lens[seq], k_start, k_lens[seq], seq, together)
        yield from [record] * tiles
        before += tiles


@given(
    lens=st.lists(
        st.tuples(
            st.sampled_from([0, 1, 5, 63, 64, 65, 200, 700, 20000]),
            st.sampled_from([0, 0, 0, 30, 300, 5000, -3, -100]),
        ),
        min_size=1,
        max_size=70,
    ),
    block_m=st.sampled_from([64, 128, 192]),
    kv_heads=st.sampled_from([1, 2, 3, 8]),
    keys_in_l2=st.sampled_from([1, 500, 2000, 10**6]),
    window=st.sampled_from([(-1, -1), (-1, 0), (100, 0), (1000, 70), (64, -1)]),
    index=st.sampled_from([torch.int32, torch.int64]),
    paged=st.booleans(),
)
def test_every_tile_once(device, lens, block_m, kv_heads, keys_in_l2, window, index, paged):
    if device.type == "cpu" and not INTERPRETED:
        pytest.skip("on the CPU kernels run in the interpreter")
    q_lens = [q for q, _ in lens]
    k_lens = [max(q + more, 0) for q, more in lens]
    records, counts = schedule(
        boundaries(q_lens, device, index),
        None if paged else boundaries(k_lens, device, index),
        torch.tensor(k_lens, device=device, dtype=index) if paged else None,
        sum(q_lens),
        kv_heads,
        block_m,
        window,
        keys_in_l2,
    )
    want = list(
        records_of(
            q_lens, k_lens, paged=paged, kv_heads=kv_heads, block_m=block_m, window=window,
            keys_in_l2=keys_in_l2,
        )
    )  # fmt: skip
    assert counts.tolist() == [len(want), 0]
    assert len(want) <= len(records)
    assert [tuple(record) for record in records[: len(want)].tolist()] == want
