"""Compiling ahead: every kernel that a model can need, before the first request waits for one."""

from collections.abc import Callable
from typing import NamedTuple

from echokernels._checks import check_range


class WarmupStep(NamedTuple):
    """A batch to run: sequence i has `query_lens[i]` new tokens, and the rows of the block table
    have room for `max_seqlen_k` tokens. How many of these are used makes no difference."""

    query_lens: tuple[int, ...]
    max_seqlen_k: int


def warmup(
    run: Callable[[WarmupStep], object],
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Calls `run` with the batches that between them meet every kernel within these limits.

    `run` is to put one such batch through a model, from the embedding to the sampled ids, with the
    strides and dtypes of real steps; what it computes does not matter. Kernels change with the
    number of tokens at powers of two (a tile that fits, the limit of a fused projection), once
    where an input fills the L2 cache, which the largest batch then does, and with the block table
    when its rows become long enough to be split. So afterwards `no_jit()` holds for every batch of
    at most `max_num_seqs` sequences and `max_num_batched_tokens` new tokens, over block tables of
    up to `max_model_len` tokens a row.
    progress: called as (done, total) before the first batch and after each.
    Raises ValueError when a limit is below 1.
    """
    for name, limit in (
        ("max_num_seqs", max_num_seqs),
        ("max_num_batched_tokens", max_num_batched_tokens),
        ("max_model_len", max_model_len),
    ):
        check_range(name, limit, 1)
    steps = warmup_steps(max_num_seqs, max_num_batched_tokens, max_model_len)
    show = progress or (lambda _done, _total: None)
    show(0, len(steps))
    for done, step in enumerate(steps, 1):
        run(step)
        show(done, len(steps))


def warmup_steps(
    max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int
) -> list[WarmupStep]:
    """Decodes of all sizes over long and short tables, and chunks of all sizes; the largest first,
    whose memory then serves the others."""
    decodes = [
        WarmupStep((1,) * num_seqs, max_seqlen_k)
        for num_seqs in _sizes(min(max_num_seqs, max_num_batched_tokens))
        for max_seqlen_k in sorted({max_model_len, 1}, reverse=True)
    ]
    most_tokens = min(max_num_batched_tokens, max_num_seqs * max_model_len)
    chunks = [
        WarmupStep(_chunks(num_tokens, max_model_len), max_model_len)
        for num_tokens in _sizes(most_tokens)
        if num_tokens > 1
    ]
    return sorted(decodes + chunks, key=lambda step: sum(step.query_lens), reverse=True)


def _chunks(num_tokens: int, max_model_len: int) -> tuple[int, ...]:
    full, rest = divmod(num_tokens, max_model_len)
    return (*(rest,) * (rest > 0), *(max_model_len,) * full)


def _sizes(limit: int) -> list[int]:
    """Powers of two up to the limit, their successors, and the limit itself."""
    powers = [1 << bit for bit in range(limit.bit_length())]
    successors = [power + 1 for power in powers if power < limit]
    return sorted({*powers, *successors, limit})
