"""What a decode would do: how many splits each sequence gets."""

from collections.abc import Sequence

import torch

from echokernels._checks import check_range
from echokernels._target import target_of
from echokernels.attention import decode_hopper
from echokernels.attention._decode_config import decode_config, sharing
from echokernels.attention.split import (
    INVARIANT_SPLITS,
    MIN_KEYS,
    MOST_SEQS,
    choose_num_splits,
    num_shares,
    pieces_of,
)


def split_plan(
    seqused_k: Sequence[int] | torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    query_len: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    window_left: int = -1,
    num_splits: int = 0,
    kv_split_size: int = 0,
    max_keys: int | None = None,
    device: torch.device | str | None = None,
) -> list[int]:
    """How many splits `paged_attention` would make of each sequence.

    seqused_k: keys of each sequence, its `query_len` queries included. num_splits, kv_split_size:
    as passed to the op. max_keys: capacity of a row of the block table (the longest sequence by
    default); it matters to batches of more than 1024 sequences only. device: the GPU it would run
    on (the current one by default).

    With num_splits = 0 the keys of all sequences together are cut into equal shares, one for each
    program that the GPU runs at once: the count is about proportional to the length, one more or
    less by where the sequence stands, and 1 for one that lies within a share. Raises ValueError for
    sizes that do not fit.
    """
    lens = seqused_k.tolist() if isinstance(seqused_k, torch.Tensor) else list(seqused_k)
    for name, value in (("query_len", query_len), ("num_heads", num_heads)):
        check_range(name, value, 1)
    check_range("num_kv_heads", num_kv_heads, 1, num_heads)
    for length in lens:
        check_range("seqused_k", length, 0)
    if num_heads % num_kv_heads:
        raise ValueError(f"num_heads is {num_heads}, must be divisible by {num_kv_heads}")
    if not lens:
        return []
    default = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.device(default if device is None else device)
    target = target_of(where)
    group = num_heads // num_kv_heads

    def visible(block_n: int) -> list[int]:
        return [n - _first_key(n, query_len, window_left, block_n) for n in lens]

    is_free = num_splits == 0 and kv_split_size == 0
    rows = group * query_len
    if is_free and decode_hopper.is_made_for(target, dtype, head_dim, rows, len(lens)):
        block_n, per_sm = decode_hopper.sharing(
            where, target, head_dim, dtype, group, len(lens) * num_kv_heads
        )
        shares = num_shares(num_kv_heads, per_sm, target.num_sms)
        return pieces_of([-(-keys // block_n) for keys in visible(block_n)], shares)
    config, num_tiles = decode_config(
        head_dim, dtype, group, query_len, kv_split_size > 0 and query_len > 1, target
    )
    if is_free and len(lens) <= MOST_SEQS:
        per_sm = sharing(
            where, target, config, head_dim, dtype, group, len(lens) * num_kv_heads
        ).per_sm
        shares = num_shares(num_kv_heads * num_tiles, per_sm, target.num_sms)
        return pieces_of([-(-keys // config.block_n) for keys in visible(config.block_n)], shares)
    count = choose_num_splits(
        num_splits,
        kv_split_size,
        len(lens) * num_kv_heads * num_tiles,
        max(lens) if max_keys is None else max_keys,
        target.num_sms,
    )
    if count == 1:
        return [1] * len(lens)
    divisor = INVARIANT_SPLITS if kv_split_size > 0 else count
    least = kv_split_size if kv_split_size > 0 else 1 if num_splits > 0 else MIN_KEYS
    return [_chunks(keys, divisor, least, config.block_n) for keys in visible(config.block_n)]


def _first_key(k_len: int, q_len: int, window_left: int, block: int) -> int:
    return max(0, k_len - q_len - window_left) // block * block if window_left >= 0 else 0


def _chunks(keys: int, divisor: int, least: int, block: int) -> int:
    chunk = -(-max(-(-keys // divisor), least) // block) * block
    return max(-(-keys // chunk), 1)
