"""The work list of a ragged prefill: query tiles of all sequences, those with most keys first.

Programs that take tiles of such a list in turn end together, whatever the mix of lengths (longest
processing time first; Graham, 1969). The list is made on the device: lengths never come to the
host.

A tile's place is the number of tiles before it. Work does not fall with a tile's number in its
sequence, so how many tiles of a sequence have more work than a given one has a closed form, and a
program counts over sequences instead of sorting tiles.
"""

import torch
import triton
import triton.language as tl

from echokernels._launch import launch, scratch
from echokernels._pdl import early_launch, let_next_start, wait_for_previous

RECORD = tl.constexpr(8)
"""int32 a tile: its first query's row in the packed tensor, the same in its sequence, the
sequence's query length, its first key's row in packed keys (0 in pages), its key length, its
number; the rest is unused."""

_BLOCK_TILES = tl.constexpr(32)
_BLOCK_SEQS = tl.constexpr(64)


@triton.jit
def _num_keys(tile, shift, k_len, most, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
              HAS_RIGHT: tl.constexpr):  # fmt: skip
    """Key tiles that a query tile sees, from 1 to `most`."""
    end = k_len
    if HAS_RIGHT:
        end = tl.minimum(k_len, tile * BLOCK_M + BLOCK_M + shift)
    return tl.minimum(tl.maximum(tl.cdiv(tl.maximum(end, 0), BLOCK_N), 1), most)


@triton.jit
def _num_heavier(work, tiles, shift, k_len, most, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                 HAS_RIGHT: tl.constexpr):  # fmt: skip
    """How many of a sequence's `tiles` see more than `work` >= 0 key tiles."""
    limit = work * BLOCK_N
    lighter = tl.where(k_len <= limit, tiles, 0)
    if HAS_RIGHT:
        room = limit - BLOCK_M - shift  # of tiles up to room // BLOCK_M
        within = tl.where(room >= 0, tl.minimum(room // BLOCK_M + 1, tiles), 0)
        lighter = tl.maximum(lighter, within)
    lighter = tl.where(work >= 1, lighter, 0)
    return tl.where(work >= most, 0, tiles - lighter)


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
        "cu_seqlens_q_ptr", "cu_seqlens_k_ptr", "seqused_k_ptr", "num_seqs", "window_right", "most",
    ]
)  # fmt: skip
def schedule_kernel(
    records_ptr,  # i32[max_tiles, RECORD], out
    count_ptr,  # i32[1], out
    cu_seqlens_q_ptr,  # [num_seqs + 1]
    cu_seqlens_k_ptr,  # [num_seqs + 1], or None
    seqused_k_ptr,  # [num_seqs], or None
    num_seqs,
    window_right,
    most,  # key tiles that a left window leaves at most
    HAS_RIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    let_next_start(PDL)
    seq = tl.program_id(0)
    q_start, q_len, k_start, k_len = _lengths(
        seq, seq < num_seqs, cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_k_ptr
    )
    tiles = tl.cdiv(q_len, BLOCK_M)
    shift = k_len - q_len + window_right
    total = tl.zeros([], tl.int32)
    for first in range(0, tl.maximum(tiles, 1), _BLOCK_TILES):
        tile = first + tl.arange(0, _BLOCK_TILES)
        work = _num_keys(tile, shift, k_len, most, BLOCK_M, BLOCK_N, HAS_RIGHT)
        # Of the own sequence: more work means a higher number, and so do ties.
        place = tiles - 1 - tile
        total = tl.zeros([], tl.int32)
        for start in range(0, num_seqs, _BLOCK_SEQS):
            other = start + tl.arange(0, _BLOCK_SEQS)
            _, other_q, _, other_k = _lengths(
                other, other < num_seqs, cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_k_ptr
            )
            other_tiles = tl.cdiv(other_q, BLOCK_M)
            total += tl.sum(other_tiles, axis=0)
            # Of ties, those of earlier sequences come first.
            least = work[:, None] - (other < seq).to(tl.int32)[None, :]
            heavier = _num_heavier(
                least, other_tiles[None, :], (other_k - other_q + window_right)[None, :],
                other_k[None, :], most, BLOCK_M, BLOCK_N, HAS_RIGHT,
            )  # fmt: skip
            place += tl.sum(tl.where((other == seq)[None, :], 0, heavier), axis=1)
        _store_records(
            records_ptr, place, tile, tiles, q_start, q_len, k_start, k_len, seq, BLOCK_M
        )
    if seq == 0:
        tl.store(count_ptr, total)


@triton.jit
def _store_records(
    records_ptr, place, tile, tiles, q_start, q_len, k_start, k_len, seq, BLOCK_M: tl.constexpr
):
    record_ptr = records_ptr + place.to(tl.int64) * RECORD
    mask = tile < tiles
    tl.store(record_ptr, q_start + tile * BLOCK_M, mask=mask)
    tl.store(record_ptr + 1, tile * BLOCK_M, mask=mask)
    tl.store(record_ptr + 2, q_len, mask=mask)
    tl.store(record_ptr + 3, k_start, mask=mask)
    tl.store(record_ptr + 4, k_len, mask=mask)
    tl.store(record_ptr + 5, seq, mask=mask)


def schedule(
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    num_tokens: int,
    block_m: int,
    block_n: int,
    window: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """(records int32 [max_tiles, RECORD], count int32 [1]) of `num_tokens` packed queries.

    window: (left, right), -1 for all; causal is right = 0. Launches one kernel.
    """
    num_seqs = cu_seqlens_q.shape[0] - 1
    device = cu_seqlens_q.device
    records = scratch((num_tokens // block_m + num_seqs, RECORD.value), torch.int32, device)
    count = scratch((1,), torch.int32, device)
    left, right = window
    # A window of left + 1 keys, for each of block_m rows, touches at most so many tiles.
    most = 2**30 if left < 0 else (left + block_m + max(right, 0)) // block_n + 2
    launch(
        schedule_kernel,
        (num_seqs,),
        records,
        count,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_k,
        num_seqs,
        max(right, 0),
        most,
        HAS_RIGHT=right >= 0,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=4,
        **early_launch(device),
    )
    return records, count
