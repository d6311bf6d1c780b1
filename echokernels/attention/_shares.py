"""Shares of a decode, found on the device: which key tiles each program attends to.

The rules of `_hopper_shares.py`, which say why, in portable Triton; `split.py` has them in Python.
Every program finds its own share from the lengths alone.
"""

import triton
import triton.language as tl


@triton.jit
def first_key(q_len, k_len, window_left, HAS_LEFT: tl.constexpr, BLOCK_N: tl.constexpr):
    """The first key that any query of a sequence sees, rounded down to a tile."""
    if HAS_LEFT:
        return tl.maximum(0, k_len - q_len - window_left) // BLOCK_N * BLOCK_N
    return k_len * 0


@triton.jit
def tiles_of(
    seqused_k_ptr,
    cu_seqlens_q_ptr,
    num_seqs,
    window_left,
    HAS_LEFT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
):
    """Key tiles of each sequence, i32[BLOCK_SEQS]."""
    seq = tl.arange(0, BLOCK_SEQS)
    exists = seq < num_seqs
    k_len = tl.load(seqused_k_ptr + seq, mask=exists, other=0).to(tl.int32)
    q_len = tl.full([BLOCK_SEQS], 1, tl.int32)
    if cu_seqlens_q_ptr is not None:
        start = tl.load(cu_seqlens_q_ptr + seq, mask=exists, other=0)
        q_len = (tl.load(cu_seqlens_q_ptr + seq + 1, mask=exists, other=0) - start).to(tl.int32)
    return tl.cdiv(k_len - first_key(q_len, k_len, window_left, HAS_LEFT, BLOCK_N), BLOCK_N)


@triton.jit
def _sum_max_sum(a0, a1, a2, b0, b1, b2):
    return a0 + b0, tl.maximum(a1, b1), a2 + b2


@triton.jit
def _sum_max_min(a0, a1, a2, b0, b1, b2):
    return a0 + b0, tl.maximum(a1, b1), tl.minimum(a2, b2)


@triton.jit
def line_up(tiles, most_shares):
    """(total, size, larger, near): the tiles of all; those of a share, of which the first `larger`
    have one more; and how near an edge of a sequence a cut moves to it."""
    total, longest, present = tl.reduce((tiles, tiles, (tiles > 0).to(tl.int32)), 0, _sum_max_sum)
    count = tl.maximum(tl.minimum(most_shares, total), 1)
    size = total // count
    near = size // 8
    if (longest * present == total) & (tl.cdiv(present, count) * count * 32 <= present * 33):
        near = longest // 2
    return total, size, total - size * count, near


@triton.jit
def holder(at, end):
    """(sequence, its begin, its end) of the tile `at`, by where each sequence ends."""
    ended = end <= at
    return tl.reduce(
        (ended.to(tl.int32), tl.where(ended, end, 0), tl.where(ended, 2147483647, end)),
        0,
        _sum_max_min,
    )


@triton.jit
def cut(share, end, total, size, larger, near):
    """Where a share begins; at the end of all if there is none."""
    at = tl.minimum(share * size + tl.minimum(share, larger), total)
    _, first, last = holder(at, end)
    if (at < total) & (tl.minimum(at - first, last - at) <= near):
        at = tl.where(at - first <= last - at, first, last)
    return at


@triton.jit
def _share_of(at, size, larger):
    """The share in which a tile is."""
    wide = larger * (size + 1)
    behind = larger + (at - wide) // tl.maximum(size, 1)
    return tl.where(at < wide, at // (size + 1), behind)


@triton.jit
def cuts_within(first, last, size, larger, near):
    """(first, last) share that begins within tiles [first, last), away from its edges; the last
    before the first if none does."""
    low = _share_of(first + near, size, larger) + 1
    return low, _share_of(tl.maximum(last - near - 1, 0), size, larger)


@triton.jit
def next_without_keys(after, tiles, num_seqs, share, most_shares):
    """Whose outputs a share writes besides: the next one behind `after`; num_seqs if none."""
    seq = tl.arange(0, tiles.shape[0])
    mine = (tiles == 0) & (seq > after) & (seq % most_shares == share)
    return tl.minimum(tl.min(tl.where(mine, seq, 2147483647), axis=0), num_seqs)
