"""Jit pieces that all sampling kernels share: how a logit counts, tiles of a row, the best lane."""

import triton
import triton.language as tl

from echokernels.sampling import reference

GREEDY_BELOW = tl.constexpr(reference.GREEDY_BELOW)
NEGLIGIBLE = tl.constexpr(reference.NEGLIGIBLE)
MAX_FLOAT = tl.constexpr(3.4028234663852886e38)
NO_TOKEN = tl.constexpr(0x7FFFFFFF)

PER_ROW = [
    "temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "seeds_ptr", "positions_ptr",
]  # fmt: skip
"""Not to be specialised on: only scalars are read through these, and slices of a packed buffer must
not recompile a kernel."""


@triton.jit
def clean(logit):
    """In fp32, NaN as -inf, +inf as the largest finite number."""
    logit = logit.to(tl.float32)
    return tl.minimum(tl.where(logit == logit, logit, float("-inf")), MAX_FLOAT)


@triton.jit
def load_tile(row_ptr, start, vocab, BLOCK_N: tl.constexpr):
    """(ids, logits) from id `start` on; -inf beyond the vocabulary."""
    token = start + tl.arange(0, BLOCK_N)
    return token, clean(tl.load(row_ptr + token, mask=token < vocab, other=float("-inf")))


@triton.jit
def below(logit, peak):
    """logit - peak; 0 where both are -inf."""
    return tl.where(logit < peak, logit - peak, 0.0)


@triton.jit
def best_lane(best, best_token):
    """(largest score, its lowest id) of all lanes."""
    peak = tl.max(best, axis=0)
    return peak, tl.min(tl.where(best == peak, best_token, NO_TOKEN), axis=0)


@triton.jit
def sum_of_products(x, y):
    """Sum of x * y, to the bit the same in every thread, so that all take the same branches by it.

    In `tl.sum(x * y)` two threads add each other's product, and each may fuse its own, unrounded,
    into the addition. Their sums then differ, and loops that compare these end in some threads
    while others wait for them.
    """
    # What is fused with the addition of 0.0 is not fused with another one. A single product is
    # added to nothing.
    return tl.sum(tl.fma(x, y, 0.0) if x.shape[0] > 1 else x * y, axis=0)


@triton.jit
def usable(temperature):
    """(whether it draws at all, 1 / temperature)."""
    # The reciprocal of more than 2^126 would be subnormal, so possibly 0, and -inf * 0 is NaN.
    clamped = tl.minimum(tl.maximum(temperature, GREEDY_BELOW), 2.0**126)
    return temperature >= GREEDY_BELOW, 1.0 / clamped


@triton.jit
def limits_count(top_k, vocab):
    return (top_k > 0) & (top_k < vocab)


@triton.jit
def is_filtered(top_k, top_p, min_p, vocab):
    return limits_count(top_k, vocab) | (top_p < 1.0) | (min_p > NEGLIGIBLE)
