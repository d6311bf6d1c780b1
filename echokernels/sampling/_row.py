"""Jit pieces that read one row of logits, tile by tile: its values, its argmax, its log-softmax.

Sums and maxima are kept per lane and reduced once, after the last tile: their order depends on
BLOCK_N alone.
"""

import triton
import triton.language as tl

_MAX_FLOAT = tl.constexpr(3.4028234663852886e38)


@triton.jit
def clean(logit):
    """In fp32, NaN as -inf, +inf as the largest finite number."""
    logit = logit.to(tl.float32)
    return tl.minimum(tl.where(logit == logit, logit, float("-inf")), _MAX_FLOAT)


@triton.jit
def load_tile(row_ptr, start, vocab, BLOCK_N: tl.constexpr):
    """(ids, logits) from id `start` on; -inf beyond the vocabulary."""
    token = start + tl.arange(0, BLOCK_N)
    return token, clean(tl.load(row_ptr + token, mask=token < vocab, other=float("-inf")))


@triton.jit
def keep_better(best, best_token, score, token):
    """Per lane. Ids only grow, so the lowest one stays on ties."""
    better = score > best
    return tl.where(better, score, best), tl.where(better, token, best_token)


@triton.jit
def best_lane(best, best_token):
    """(largest score, its lowest id) of all lanes."""
    peak = tl.max(best, axis=0)
    return peak, tl.min(tl.where(best == peak, best_token, 0x7FFFFFFF), axis=0)


@triton.jit
def argmax(row_ptr, vocab, BLOCK_N: tl.constexpr):
    """(largest logit, its lowest id, a logit that at least min(BLOCK_N, vocab) ids reach)."""
    best = tl.full([BLOCK_N], float("-inf"), tl.float32)
    best_token = tl.zeros([BLOCK_N], tl.int32)
    for start in range(0, vocab, BLOCK_N):
        token, logit = load_tile(row_ptr, start, vocab, BLOCK_N)
        best, best_token = keep_better(best, best_token, logit, token)
    peak, token = best_lane(best, best_token)
    return peak, token, tl.min(best, axis=0)


@triton.jit
def log_softmax_at(row_ptr, vocab, peak, token, BLOCK_N: tl.constexpr):
    total = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, vocab, BLOCK_N):
        ids, logit = load_tile(row_ptr, start, vocab, BLOCK_N)
        total += tl.where(ids < vocab, tl.exp(_below(logit, peak)), 0.0)
    chosen = _below(clean(tl.load(row_ptr + token)), peak)
    return chosen - tl.log(tl.sum(total, axis=0))


@triton.jit
def _below(logit, peak):
    """logit - peak; 0 where both are -inf."""
    return tl.where(logit < peak, logit - peak, 0.0)
