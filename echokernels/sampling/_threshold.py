"""Jit pieces that find, without sorting, the least likely id that top-k and top-p keep.

fp32 numbers keep their order when their bits are read as integers ("keys"). So the threshold is
found by a search over integers: each step is a pass over the row that sums the weights (1 for
top-k, probabilities for top-p) above three pivots, and leaves a quarter of the interval. It ends
after at most 16 steps for fp32, 10 for fp16 and 8 for bf16.
"""

import triton
import triton.language as tl

from echokernels.sampling._row import load_tile


@triton.jit
def key_of(logit, KEY_SHIFT: tl.constexpr):
    """i32 in the order of the logits, -0.0 and 0.0 being one.

    KEY_SHIFT drops the low bits, which tell nothing in an fp32 number that came from a half.
    """
    bits = tl.where(logit == 0.0, 0.0, logit).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> KEY_SHIFT


@triton.jit
def find_threshold(
    row_ptr,
    vocab,
    peak,  # the largest logit, finite
    common,  # a logit that at least min(BLOCK_N, vocab) ids reach
    temperature,
    top_k,
    top_p,
    KEY_SHIFT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The key, as i64, of the least likely id that top_k and top_p keep."""
    threshold = key_of(tl.full([], float("-inf"), tl.float32), KEY_SHIFT).to(tl.int64)
    end = key_of(peak, KEY_SHIFT).to(tl.int64) + 1
    if (top_k > 0) & (top_k < vocab):
        if top_k <= BLOCK_N:
            threshold = key_of(common, KEY_SHIFT).to(tl.int64)
        k = top_k.to(tl.float32)
        threshold = _search(
            row_ptr, vocab, peak, temperature, threshold, end, k, False, KEY_SHIFT, BLOCK_N
        )
    if top_p < 1.0:
        top_p = tl.maximum(top_p, 0.0)
        first = threshold.to(tl.int32)
        total, _, _ = _weights_above(
            row_ptr, vocab, peak, temperature, first, first, first, True, KEY_SHIFT, BLOCK_N
        )
        # All ids lighter than this together weigh less than the share of the mass that top_p drops:
        # the threshold is not among them. The factor 2 is a margin for rounding.
        lightest = (1.0 - top_p) * total / (2.0 * vocab)
        heavy = key_of(peak + temperature * tl.log(lightest), KEY_SHIFT).to(tl.int64)
        threshold = tl.maximum(threshold, heavy)
        mass = tl.maximum(top_p * total, 1.0)  # 1 is the argmax's
        threshold = _search(
            row_ptr, vocab, peak, temperature, threshold, end, mass, True, KEY_SHIFT, BLOCK_N
        )
    return threshold


@triton.jit
def _search(
    row_ptr,
    vocab,
    peak,
    temperature,
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
            temperature,
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
    temperature,
    first,  # i32 keys
    second,
    third,
    BY_MASS: tl.constexpr,  # an id weighs exp((logit - peak) / temperature); else 1
    KEY_SHIFT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Weights of the ids whose key is at least `first`, `second` and `third`."""
    above_first = tl.zeros([BLOCK_N], tl.float32)
    above_second = tl.zeros([BLOCK_N], tl.float32)
    above_third = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, vocab, BLOCK_N):
        token, logit = load_tile(row_ptr, start, vocab, BLOCK_N)
        if BY_MASS:
            weight = tl.exp((logit - peak) / temperature)
        else:
            weight = tl.where(token < vocab, 1.0, 0.0)
        key = key_of(logit, KEY_SHIFT)
        above_first += tl.where(key >= first, weight, 0.0)
        above_second += tl.where(key >= second, weight, 0.0)
        above_third += tl.where(key >= third, weight, 0.0)
    return tl.sum(above_first, axis=0), tl.sum(above_second, axis=0), tl.sum(above_third, axis=0)
