"""Jit pieces that find the least likely id that top-k and top-p keep, where candidates are many.

Each step of the search is a pass over the row that sums the weights (1 for top-k, probabilities for
top-p) above three keys, and leaves a quarter of the interval. It ends after at most 16 steps for
fp32, 10 for fp16 and 8 for bf16.
"""

import triton
import triton.language as tl

from echokernels.sampling._keys import key_of
from echokernels.sampling._row import load_tile


@triton.jit
def find_threshold(
    row_ptr,
    vocab,
    peak,  # the largest logit, finite
    floor,  # i32 key that every id reaches which the filters keep
    coldness,
    limited,
    top_k,
    top_p,
    mass,  # of the whole row; needed where top_p is the first limit
    KEY_SHIFT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The key, as i64, of the least likely id that top_k and top_p keep."""
    threshold = floor.to(tl.int64)
    end = key_of(peak, KEY_SHIFT).to(tl.int64) + 1
    if limited:
        k = top_k.to(tl.float32)
        threshold = _search(
            row_ptr, vocab, peak, coldness, threshold, end, k, False, KEY_SHIFT, BLOCK_N
        )
    if top_p < 1.0:
        if limited:
            first = threshold.to(tl.int32)
            mass, _, _ = _weights_above(
                row_ptr, vocab, peak, coldness, first, first, first, True, KEY_SHIFT, BLOCK_N
            )
        target = tl.maximum(top_p * mass, 1.0)  # 1 is the argmax's
        threshold = _search(
            row_ptr, vocab, peak, coldness, threshold, end, target, True, KEY_SHIFT, BLOCK_N
        )
    return threshold


@triton.jit
def _search(
    row_ptr,
    vocab,
    peak,
    coldness,
    low,  # i64 keys: the weight above `low` reaches the target,
    high,  # that above `high` does not
    target,
    BY_MASS: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The largest key above which (itself included) the weight is at least `target`, > 0."""
    weight = 2.0 * target
    # Exactly the target cannot be improved on.
    while (high - low > 1) & (weight != target):
        step = (high - low + 3) // 4
        first = low + step
        second = first + step
        third = second + step
        above_first, above_second, above_third = _weights_above(
            row_ptr,
            vocab,
            peak,
            coldness,
            first.to(tl.int32),
            second.to(tl.int32),
            third.to(tl.int32),
            BY_MASS,
            KEY_SHIFT,
            BLOCK_N,
        )
        if above_first < target:
            high = first
        elif above_second < target:
            low = first
            high = tl.minimum(second, high)
            weight = above_first
        elif above_third < target:
            low = second
            high = tl.minimum(third, high)
            weight = above_second
        else:
            low = third
            weight = above_third
    return low


@triton.jit
def _weights_above(
    row_ptr,
    vocab,
    peak,
    coldness,
    first,  # i32 keys
    second,
    third,
    BY_MASS: tl.constexpr,  # an id weighs exp((logit - peak) * coldness); else 1
    KEY_SHIFT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Weights of the ids whose key is at least `first`, `second` and `third`."""
    above_first = tl.zeros([BLOCK_N], tl.float32)
    above_second = tl.zeros([BLOCK_N], tl.float32)
    above_third = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, vocab, BLOCK_N):
        token, logit = load_tile(row_ptr, start, vocab, BLOCK_N)
        weight = tl.where(token < vocab, 1.0, 0.0)
        if BY_MASS:
            weight = tl.exp((logit - peak) * coldness)
        key = key_of(logit, KEY_SHIFT)
        above_first += tl.where(key >= first, weight, 0.0)
        above_second += tl.where(key >= second, weight, 0.0)
        above_third += tl.where(key >= third, weight, 0.0)
    return tl.sum(above_first, axis=0), tl.sum(above_second, axis=0), tl.sum(above_third, axis=0)
