"""Logits as integers, and the search for the key at which weights reach a target.

fp32 numbers keep their order when their bits are read as integers, so a search over these ends
after few rounds whatever the logits are.
"""

import triton
import triton.language as tl

_PIVOTS = tl.constexpr(8)


@triton.jit
def key_of(logit, KEY_SHIFT: tl.constexpr):
    """i32 in the order of the logits, -0.0 and 0.0 being one.

    KEY_SHIFT drops the low bits, which tell nothing in an fp32 number that came from a half.
    """
    bits = tl.where(logit == 0.0, 0.0, logit).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> KEY_SHIFT


@triton.jit
def search(key, weight, low, high, target, slack):
    """The largest key k, at least `low` and below `high`, such that the weights of all keys >= k
    sum to `target` or more; `low` if there is none.

    May stop at a smaller k once that sum is no more than slack * target. A round looks at eight
    keys and leaves a ninth of the interval: 11 are the most.
    """
    above = tl.full([], float("inf"), tl.float32)
    # high - low itself could overflow.
    while (low < high - 1) & (above > target * slack):
        # The distance, as an unsigned number, does not overflow.
        step = ((high - low).to(tl.uint32) // (_PIVOTS + 1) + 1).to(tl.int32)
        pivot = low + step * (1 + tl.arange(0, _PIVOTS))
        reaches = key[None, :] >= pivot[:, None]
        above_pivot = tl.sum(tl.where(reaches, weight[None, :], 0.0), axis=1)
        enough = (above_pivot >= target) & (pivot < high)
        above = tl.min(tl.where(enough, above_pivot, above), axis=0)
        high = tl.min(tl.where(enough, high, tl.minimum(pivot, high)), axis=0)
        low = tl.max(tl.where(enough, pivot, low), axis=0)
    return low
