"""How a sequence's keys are split among programs (flash decoding): pure functions, no GPU.

The grid and the workspace come from capacity (batch, KV heads, table width, SM count), never from
lengths on the host; each program finds its own part from `seqused_k`, so a captured graph serves
any lengths. By default the keys of all sequences together are cut into equal shares (`_shares.py`,
`_hopper_shares.py`; the same rules in Python here); splits that are forced, or independent of the
batch, are chunks of each sequence (`chunks` in `_split_k.py`).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

MAX_SPLITS = 128
INVARIANT_SPLITS = 32
"""Most partials of a row under batch invariance (`kv_split_size` > 0), whatever its length."""

MAX_QUERIES = 16
"""Most query tokens of one sequence in `paged_attention`; longer ones are `flash_attn_varlen`'s."""

MIN_KEYS = 64
"""Keys that are not worth splitting: one tile."""

MOST_SEQS = 1024
"""Sequences of a batch whose keys are cut into equal shares: every program looks at all lengths."""

MOST_SHARES_PER_SM = 8
MOST_SHARED_ROWS = 32
"""Rows of (query, head of the group) of a sequence that the kernel for Hopper takes."""

_MOST_TILE_ROWS = 64

# What an SM holds at once (H200: 512 programs are best at 1 x 32k, 1 x 128k, 8 x 8k and 64 x 8k);
# more of them write more partials and leave a ragged last wave.
_PROGRAMS_PER_SM = 4
# Lengths are not known here. A sequence much longer than the others must not keep one program
# busy when all else is done, so a long row of the table is split even in a large batch.
_MOST_KEYS = 4096
_SPLITS_OF_A_LARGE_BATCH = 8
_ANY_LENGTH = 2**31


def choose_num_splits(
    num_splits: int, kv_split_size: int, programs: int, max_keys: int, num_sms: int
) -> int:
    """The number of splits to launch for.

    programs: programs without splitting (sequences x KV heads x row tiles); max_keys: capacity of a
    row of the block table; num_splits: 0 = choose, else that many. kv_split_size > 0 fixes the
    chunk instead.
    """
    if kv_split_size > 0:
        return min(INVARIANT_SPLITS, _cdiv(max_keys, kv_split_size)) if max_keys else 1
    if num_splits > 0:
        return num_splits
    filling = _PROGRAMS_PER_SM * num_sms // max(programs, 1)
    levelling = min(_cdiv(max_keys, _MOST_KEYS), _SPLITS_OF_A_LARGE_BATCH)
    return max(1, min(max(filling, levelling), _cdiv(max_keys, MIN_KEYS), MAX_SPLITS))


def most_split_rows(
    num_splits: int, max_seqs: int, max_tokens: int, kv_heads: int, num_sms: int
) -> int:
    """The most (query token, split) pairs of any batch within max_seqs and max_tokens queries."""
    if num_splits > 0:
        return num_splits * max_tokens
    return max(
        choose_num_splits(0, 0, seqs * kv_heads, _ANY_LENGTH, num_sms)
        * min(max_tokens, MAX_QUERIES * seqs)
        for seqs in range(1, max(max_seqs, 1) + 1)
    )


def most_piece_rows(max_tokens: int, num_heads: int, kv_heads: int, num_sms: int) -> int:
    """The most rows of the pieces that equal shares leave: two for each program."""
    rows = num_heads // kv_heads * min(max_tokens, MAX_QUERIES)
    tile = min(rows, _MOST_TILE_ROWS)
    return 2 * max(MOST_SHARES_PER_SM * num_sms * tile, kv_heads * (rows + _MOST_TILE_ROWS))


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def num_shares(rows: int, per_sm: int, num_sms: int) -> int:
    """Of the keys, for each of `rows` (KV heads times row tiles), with `per_sm` programs on an
    SM."""
    return max(per_sm * num_sms // rows, 1)


def block_seqs(num_seqs: int) -> int:
    """Few sizes, as each is a compilation: one sequence, half a warp, a warpgroup, and so on."""
    if num_seqs <= 16:
        return 1 if num_seqs == 1 else 16
    return max(1 << (num_seqs - 1).bit_length(), 128)


def share_cuts(tiles: Sequence[int], most_shares: int) -> list[int]:
    """Where the shares of `_hopper_shares.py` and `_shares.py` begin, and the last one ends: the
    number of key tiles before, over sequences of so many `tiles` each."""
    total, longest = sum(tiles), max(tiles, default=0)
    count = max(min(most_shares, total), 1)
    size, larger = divmod(total, count)
    near = size // 8
    present = sum(number > 0 for number in tiles)
    if longest * present == total and -(-present // count) * count * 32 <= present * 33:
        near = longest // 2
    ends = [*accumulate(tiles)]
    begins = [share * size + min(share, larger) for share in range(count + 1)]
    return [_moved_to_edge(at, ends, near) for at in begins]


def _moved_to_edge(at: int, ends: Sequence[int], near: int) -> int:
    index = bisect_right(ends, at)
    if index == len(ends):
        return at
    first, last = ends[index - 1] if index else 0, ends[index]
    if min(at - first, last - at) > near:
        return at
    return first if at - first <= last - at else last


def pieces_of(tiles: Sequence[int], most_shares: int) -> list[int]:
    """How many pieces the shares make of each sequence."""
    cuts = sorted({*share_cuts(tiles, most_shares)})
    ends = [*accumulate(tiles)]
    begins = [0, *ends[:-1]]
    return [
        1 + max(bisect_left(cuts, end) - bisect_right(cuts, begin), 0)
        for begin, end in zip(begins, ends, strict=True)
    ]
