"""The work list of a ragged prefill: the order in which programs take query tiles.

Sequences with most keys come first and, of a sequence, the tiles that see most, so that what is
left at the end is small, whatever the mix of lengths (longest processing time first; Graham, 1969).
The tiles of one sequence stay together, and so do those of a few of its heads where the keys and
values of all would not fit the L2: programs that run at the same time read the same keys.

The list is made on the device: lengths never come to the host. It has a record for each query tile,
but a record describes its whole sequence; which head and which tile an item of work is follows from
its number (`_hopper_work.work_of`).
"""

import torch
import triton
import triton.language as tl

from echokernels._launch import launch, scratch
from echokernels._pdl import early_launch, let_next_start, wait_for_previous

RECORD = tl.constexpr(8)
"""int32 a record: the number of tiles of all sequences before this one in the list, that of its
tiles, its first query's row in the packed tensor, its query length, its first key's row in packed
keys (0 in pages), its key length, its number in the batch, and how many KV heads stay together."""

_BLOCK_RECORDS = tl.constexpr(128)
_BLOCK_SEQS = tl.constexpr(64)


@triton.jit
def _lengths(seq, mask, cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_k_ptr):
    """(first query, queries, first key, keys) of sequences, int32; 0 where masked."""
    q_start = tl.load(cu_seqlens_q_ptr + seq, mask=mask, other=0).to(tl.int32)
    q_len = tl.load(cu_seqlens_q_ptr + seq + 1, mask=mask, other=0).to(tl.int32) - q_start
    k_start = tl.zeros_like(q_start)
    if cu_seqlens_k_ptr is not None:
        k_start = tl.load(cu_seqlens_k_ptr + seq, mask=mask, other=0).to(tl.int32)
    if seqused_k_ptr is not None:
        k_len = tl.load(seqused_k_ptr + seq, mask=mask, other=0).to(tl.int32)
    else:
        k_len = tl.load(cu_seqlens_k_ptr + seq + 1, mask=mask, other=0).to(tl.int32) - k_start
    return q_start, q_len, k_start, k_len


@triton.jit(
    do_not_specialize=[
        "cu_seqlens_q_ptr", "cu_seqlens_k_ptr", "seqused_k_ptr", "num_seqs", "most_keys",
        "kv_heads", "keys_in_l2",
    ]
)  # fmt: skip
def schedule_kernel(
    records_ptr,  # i32[max_tiles, RECORD], out
    counts_ptr,  # i32[2], out: tiles in the list; items taken from it, 0
    cu_seqlens_q_ptr,  # [num_seqs + 1]
    cu_seqlens_k_ptr,  # [num_seqs + 1], or None
    seqused_k_ptr,  # [num_seqs], or None
    num_seqs,
    most_keys,  # that a query tile sees
    kv_heads,
    keys_in_l2,  # of one head
    BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    let_next_start(PDL)
    seq = tl.program_id(0)
    q_start, q_len, k_start, k_len = _lengths(
        seq, seq < num_seqs, cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_k_ptr
    )
    seen = tl.minimum(k_len, most_keys)
    before = tl.zeros([], tl.int32)
    total = tl.zeros([], tl.int32)
    for start in range(0, num_seqs, _BLOCK_SEQS):
        other = start + tl.arange(0, _BLOCK_SEQS)
        _, other_q, _, other_k = _lengths(
            other, other < num_seqs, cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_k_ptr
        )
        other_seen = tl.minimum(other_k, most_keys)
        comes_first = (other_seen > seen) | ((other_seen == seen) & (other < seq))
        tiles = tl.cdiv(other_q, BLOCK_M)
        before += tl.sum(tl.where(comes_first, tiles, 0), axis=0)
        total += tl.sum(tiles, axis=0)

    tiles = tl.cdiv(q_len, BLOCK_M)
    rounds = tl.cdiv(kv_heads, tl.maximum(keys_in_l2 // tl.maximum(seen, 1), 1))
    together = tl.cdiv(kv_heads, rounds)
    for first in range(0, tiles, _BLOCK_RECORDS):
        tile = first + tl.arange(0, _BLOCK_RECORDS)
        record_ptr = records_ptr + (before + tile).to(tl.int64) * RECORD
        mask = tile < tiles
        tl.store(record_ptr, before, mask=mask)
        tl.store(record_ptr + 1, tiles, mask=mask)
        tl.store(record_ptr + 2, q_start, mask=mask)
        tl.store(record_ptr + 3, q_len, mask=mask)
        tl.store(record_ptr + 4, k_start, mask=mask)
        tl.store(record_ptr + 5, k_len, mask=mask)
        tl.store(record_ptr + 6, seq, mask=mask)
        tl.store(record_ptr + 7, together, mask=mask)
    if seq == 0:
        tl.store(counts_ptr, total)
        tl.store(counts_ptr + 1, 0)


def schedule(
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    num_tokens: int,
    kv_heads: int,
    block_m: int,
    window: tuple[int, int],
    keys_in_l2: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(records int32 [max_tiles, RECORD], counts int32 [2]) of `num_tokens` packed queries.

    window: (left, right), -1 for all; causal is right = 0. keys_in_l2: keys of one head that the L2
    is to hold with their values. Launches one kernel.
    """
    num_seqs = cu_seqlens_q.shape[0] - 1
    device = cu_seqlens_q.device
    records = scratch((num_tokens // block_m + num_seqs, RECORD.value), torch.int32, device)
    counts = scratch((2,), torch.int32, device)
    left, right = window
    launch(
        schedule_kernel,
        (num_seqs,),
        records,
        counts,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_k,
        num_seqs,
        left + block_m + right if min(window) >= 0 else 2**30,
        kv_heads,
        keys_in_l2,
        BLOCK_M=block_m,
        num_warps=4,
        **early_launch(device),
    )
    return records, counts
