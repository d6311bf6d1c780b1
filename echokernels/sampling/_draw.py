"""Jit pieces that draw an id: from a list of candidates, or from ids in a row."""

import triton
import triton.language as tl

from echokernels.sampling._keys import key_of, search
from echokernels.sampling._noise import gumbel, uniform_at, uniform_from
from echokernels.sampling._row import NEGLIGIBLE, best_lane, load_tile

# More than the rounding of an upper bound of a score.
_MARGIN = tl.constexpr(1e-3)


@triton.jit
def draw_from_list(
    ids_ptr,  # f32[count]
    logits_ptr,  # f32[count], those of all the ids that reach `floor`
    count,  # at most BLOCK_N
    floor,  # i32 key that every id reaches which the filters keep
    peak,
    coldness,
    limited,
    top_k,
    top_p,
    min_p,
    mass,  # of the whole row; needed where top_p is the first limit
    seed,
    position,
    KEY_SHIFT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The winner of the ids that the filters keep."""
    slot = tl.arange(0, BLOCK_N)
    inside = slot < count
    token = tl.load(ids_ptr + slot, mask=inside, other=0.0).to(tl.int32)
    logit = tl.load(logits_ptr + slot, mask=inside, other=float("-inf"))
    score = (logit - peak) * coldness
    key = key_of(logit, KEY_SHIFT)
    end = key_of(peak, KEY_SHIFT) + 1
    if limited:
        one = tl.full([BLOCK_N], 1.0, tl.float32)
        floor = search(key, one, floor, end, top_k.to(tl.float32), 1.0)
        mass = tl.sum(tl.where(key >= floor, tl.exp(score), 0.0), axis=0)
    if top_p < 1.0:
        # The most likely id weighs 1 and is always kept.
        floor = search(key, tl.exp(score), floor, end, tl.maximum(top_p * mass, 1.0), 1.0)
    kept = (key >= floor) & (score >= tl.log(tl.minimum(tl.maximum(min_p, NEGLIGIBLE), 1.0)))
    score = tl.where(kept, score + gumbel(uniform_at(seed, position, token)), float("-inf"))
    _, token = best_lane(score, token)
    return token


@triton.jit
def draw_from_row(
    row_ptr,
    vocab,
    peak,
    coldness,
    threshold,  # i32 key
    min_p,
    seed,
    position,
    KEY_SHIFT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The winner of the ids whose key reaches `threshold` and that min_p keeps."""
    cutoff = tl.log(tl.minimum(tl.maximum(min_p, NEGLIGIBLE), 1.0))
    best, best_token = tl.full([], float("-inf"), tl.float32), tl.full([], 0, tl.int32)
    for start in range(0, vocab, BLOCK_N):
        _, logit = load_tile(row_ptr, start, vocab, BLOCK_N)
        score = (logit - peak) * coldness
        kept = (key_of(logit, KEY_SHIFT) >= threshold) & (score >= cutoff)
        # Noise costs more than all else, and once a filter is on few tiles need any.
        if tl.max(kept.to(tl.int32), axis=0) > 0:
            score = tl.where(kept, score, float("-inf"))
            best, best_token = improve(best, best_token, score, seed, position, start, BLOCK_N)
    return best_token


@triton.jit
def improve(
    best,
    best_token,
    score,  # f32[BLOCK_N] of the ids from `start` on; -inf is never drawn
    seed,
    position,
    start,
    BLOCK_N: tl.constexpr,
):
    """(largest score plus noise, its id) among these ids and, all below them, `best_token`.

    Noise is at most -log(u), and close to it where it is large. So exp(-score) * u tells cheaply
    who may win, and only for those, one after the other, are the logarithms of the noise taken.
    """
    token = start + tl.arange(0, BLOCK_N)
    least = uniform_from(seed, position, start, BLOCK_N) * tl.exp(-score)
    lowest = tl.min(least, axis=0)
    while _MARGIN - tl.log(lowest) > best:
        at = tl.min(tl.where(least == lowest, token, 0x7FFFFFFF), axis=0)
        score_at = tl.max(tl.where(token == at, score, float("-inf")), axis=0)
        challenge = score_at + gumbel(uniform_at(seed, position, at))
        better = (challenge > best) | ((challenge == best) & (at < best_token))
        best = tl.where(better, challenge, best)
        best_token = tl.where(better, at, best_token)
        least = tl.where(token == at, float("inf"), least)
        lowest = tl.min(least, axis=0)
    return best, best_token
