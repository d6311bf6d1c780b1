"""How a sequence's keys are split among programs (flash decoding): pure functions, no GPU.

The grid and the workspace come from capacity (batch, KV heads, table width, SM count), never from
lengths on the host; each program finds its own chunk from `seqused_k`, so a captured graph serves
any lengths. How a program finds its chunk is `chunks` in `_split_k.py`.
"""

MAX_SPLITS = 128
INVARIANT_SPLITS = 32
"""Most partials of a row under batch invariance (`kv_split_size` > 0), whatever its length."""

MAX_QUERIES = 16
"""Most query tokens of one sequence in `paged_attention`; longer ones are `flash_attn_varlen`'s."""

MIN_KEYS = 64
"""Keys that are not worth splitting: one tile."""

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


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)
