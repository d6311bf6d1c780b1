"""What a decode would do: how many splits each sequence gets."""

from collections.abc import Sequence

import torch

from echokernels._checks import check_range
from echokernels._target import Target, target_of
from echokernels.attention import decode_hopper
from echokernels.attention.paged_decode import decode_config
from echokernels.attention.split import INVARIANT_SPLITS, MIN_KEYS, choose_num_splits, pieces_of


def split_plan(
    seqused_k: Sequence[int] | torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    query_len: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    page_size: int = 16,
    window_left: int = -1,
    num_splits: int = 0,
    kv_split_size: int = 0,
    max_keys: int | None = None,
    device: torch.device | str | None = None,
) -> list[int]:
    """How many splits `paged_attention` would make of each sequence.

    seqused_k: keys of each sequence, its `query_len` queries included. num_splits, kv_split_size:
    as passed to the op. max_keys: capacity of a row of the block table (the longest sequence by
    default), which portable kernels choose by. device: the GPU it would run on (the current one by
    default).

    With num_splits = 0 a Hopper GPU cuts the keys of all sequences together into equal shares, one
    for each program that it runs at once: the count is about proportional to the length, one more
    or less by where the sequence stands, and 1 for one that lies within a share. Raises ValueError
    for sizes that do not fit.
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
    target = target_of(torch.device(default if device is None else device))
    group = num_heads // num_kv_heads

    def visible(block_n: int) -> list[int]:
        return [n - _first_key(n, query_len, window_left, block_n) for n in lens]

    if (
        num_splits == 0
        and kv_split_size == 0
        and decode_hopper.is_made_for(
            target, dtype, head_dim, group * query_len, page_size, len(lens)
        )
    ):
        block_n, shares = _shares(head_dim, len(lens), num_kv_heads, target)
        return pieces_of([-(-keys // block_n) for keys in visible(block_n)], shares)
    config, num_tiles = decode_config(
        head_dim, dtype, group, query_len, kv_split_size > 0 and query_len > 1, target
    )
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


def _shares(head_dim: int, num_seqs: int, kv_heads: int, target: Target) -> tuple[int, int]:
    """(keys of a tile, shares for each KV head) of the kernel for Hopper."""
    block_n, per_sm = decode_hopper.plan(head_dim, num_seqs * kv_heads, target.num_sms)
    return block_n, decode_hopper.most_shares(kv_heads, per_sm, target.num_sms)


def _first_key(k_len: int, q_len: int, window_left: int, block: int) -> int:
    return max(0, k_len - q_len - window_left) // block * block if window_left >= 0 else 0


def _chunks(keys: int, divisor: int, least: int, block: int) -> int:
    chunk = -(-max(-(-keys // divisor), least) // block) * block
    return max(-(-keys // chunk), 1)
