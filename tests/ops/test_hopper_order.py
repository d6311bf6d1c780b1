"""The order of work of the Hopper prefill: every tile of every head once, most keys first."""

from itertools import accumulate

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from echokernels import flash_attn_varlen
from echokernels._path import forced_path
from echokernels.attention._hopper_memory import Shape
from echokernels.attention._hopper_order import (
    TABLE,
    WorkList,
    list_kernel,
    make_lengths,
    make_table,
    work_of,
)
from echokernels.attention._hopper_work import Call
from tests.ops.attention_oracle import Features, attend_ragged, check
from tests.strategies import boundaries, generator, poisoned, randn

pytestmark = pytest.mark.gpu


@gluon.jit(do_not_specialize=["num_seqs", "most_keys", "heads", "group", "keys_in_l2"])
def _write_order_kernel(
    out_ptr,  # i32[num_items + 1, 7]
    records_ptr,
    num_tiles_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    seqused_k_ptr,
    num_seqs,
    most_keys,
    heads,
    group,
    keys_in_l2,
    S: gl.constexpr,
):
    none = cu_seqlens_q_ptr
    call = Call(
        heads, group, keys_in_l2, heads, heads, heads, heads, none, heads, none, none, heads, none,
        heads, heads, none, heads, heads, S,
    )  # fmt: skip
    lengths = make_lengths(
        cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_k_ptr, num_seqs, most_keys, S
    )
    places = WorkList(records_ptr, gl.load(num_tiles_ptr)) if S.has_list else make_table(lengths)
    for item in range(places.num_tiles * heads + 1):
        work = work_of(item, places, lengths, call)
        ptr = out_ptr + item * 7
        gl.store(ptr, work.seq)
        gl.store(ptr + 1, work.head)
        gl.store(ptr + 2, work.row)
        gl.store(ptr + 3, work.rows)
        gl.store(ptr + 4, work.position)
        gl.store(ptr + 5, work.k_start)
        gl.store(ptr + 6, work.k_len)


def shape_of(consumers, has_list, paged):
    return Shape(
        head_dim=64, block_d=64, block_n=128, slots=2, q_slots=1, consumers=consumers,
        page_size=16 if paged else 0, has_left=False, has_right=True, has_softcap=False,
        has_alibi=False, has_sinks=False, has_lse=False, masks_all=False, stages_output=True,
        has_codes=False, code_slots=0, has_list=has_list, has_cu_seqlens_k=not paged,
        has_seqused_k=paged,
    )  # fmt: skip


def expected(q_lens, k_lens, *, paged, kv_heads, group, block_m, most_keys, keys_in_l2):
    """What each item should be, in order."""
    q_starts, k_starts = ([0, *accumulate(lens)] for lens in (q_lens, k_lens))
    seen = [min(k_len, most_keys) for k_len in k_lens]
    for seq in sorted(range(len(q_lens)), key=lambda seq: -seen[seq]):
        fit = max(keys_in_l2 // max(seen[seq], 1), 1)
        together = -(-kv_heads // -(-kv_heads // fit)) * group  # as even as can be
        tiles = -(-q_lens[seq] // block_m)
        for first_head in range(0, kv_heads * group, together):
            for tile in range(tiles - 1, -1, -1):
                for head in range(first_head, min(first_head + together, kv_heads * group)):
                    first = tile * block_m
                    yield (
                        seq, head, q_starts[seq] + first, q_lens[seq] - first,
                        first + k_lens[seq] - q_lens[seq], 0 if paged else k_starts[seq],
                        k_lens[seq],
                    )  # fmt: skip


@settings(max_examples=30)
@example(  # three KV heads, of which two fit: the last stands alone
    lens=[(700, 0), (200, 0)], consumers=2, kv_heads=3, group=4, keys_in_l2=1500, most_keys=2**30,
    index=torch.int32, paged=False, has_list=False, copies=1,
)  # fmt: skip
@given(
    lens=st.lists(
        st.tuples(
            st.sampled_from([0, 1, 5, 64, 65, 200, 700]),
            st.sampled_from([0, 0, 0, 30, 300, 5000, -3, -100]),
        ),
        min_size=1,
        max_size=TABLE.value,
    ),
    consumers=st.sampled_from([2, 3]),
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 4]),
    keys_in_l2=st.sampled_from([1, 500, 2000, 10**6]),
    most_keys=st.sampled_from([2**30, 100, 1000]),
    index=st.sampled_from([torch.int32, torch.int64]),
    paged=st.booleans(),
    has_list=st.booleans(),
    copies=st.sampled_from([1, 3]),
)
def test_every_tile_of_every_head_once(
    cuda, lens, consumers, kv_heads, group, keys_in_l2, most_keys, index, paged, has_list, copies
):
    lens = lens * copies if has_list else lens
    q_lens = [q for q, _ in lens]
    k_lens = [max(q + more, 0) for q, more in lens]
    S = shape_of(consumers, has_list, paged)
    cu_seqlens_q, cu_seqlens_k = (boundaries(lens, index, cuda) for lens in (q_lens, k_lens))
    seqused_k = torch.tensor(k_lens, dtype=index, device=cuda)
    sequences = (
        cu_seqlens_q, None if paged else cu_seqlens_k, seqused_k if paged else None, len(lens),
        most_keys,
    )  # fmt: skip
    want = list(
        expected(
            q_lens, k_lens, paged=paged, kv_heads=kv_heads, group=group, block_m=consumers * 64,
            most_keys=most_keys, keys_in_l2=keys_in_l2,
        )
    )  # fmt: skip
    heads = kv_heads * group
    records = torch.full((len(want) // heads + 1, 2), -7, dtype=torch.int32, device=cuda)
    num_tiles = torch.full((1,), -7, dtype=torch.int32, device=cuda)
    if has_list:
        list_kernel[(-(-len(lens) // TABLE.value),)](
            records, num_tiles, *sequences, S=S, num_warps=4
        )
        assert num_tiles.item() == len(want) // heads
        assert records[-1].tolist() == [-7, -7]
    out = torch.full((len(want) + 1, 7), -7, dtype=torch.int32, device=cuda)
    _write_order_kernel[(1,)](
        out, records, num_tiles, *sequences, heads, group, keys_in_l2, S=S, num_warps=4
    )
    *items, after = [tuple(item) for item in out.tolist()]
    assert items == want
    assert after[0] == -1


@pytest.mark.parametrize("num_seqs", [TABLE.value, TABLE.value + 1, 700])
def test_many_sequences(cuda, num_seqs):
    gen = generator(num_seqs)
    q_lens = [[1, 70, 3, 0, 129][i % 5] for i in range(num_seqs)]
    k_lens = [q + [0, 50, 200][i % 3] for i, q in enumerate(q_lens)]
    q = randn(sum(q_lens), 2, 64, dtype=torch.bfloat16, device=cuda, gen=gen)
    k, v = (randn(sum(k_lens), 1, 64, dtype=torch.bfloat16, device=cuda, gen=gen) for _ in range(2))
    cu_seqlens = [boundaries(lens, torch.int32, cuda) for lens in (q_lens, k_lens)]
    with forced_path("hopper"):
        out, lse = flash_attn_varlen(
            q, k, v, *cu_seqlens, max(q_lens), max(k_lens), causal=True, return_lse=True,
            out=poisoned(*q.shape, dtype=q.dtype, device=cuda),
        )  # fmt: skip
    values = list(v.split(k_lens))
    want = attend_ragged(q, list(k.split(k_lens)), values, q_lens, 0.125, Features())
    check(out, lse, *want, values)
