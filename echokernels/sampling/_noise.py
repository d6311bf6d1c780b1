"""The Gumbel noise -log(-log(1 - u)) of ids; u comes from the counter-based generator Philox."""

import triton
import triton.language as tl


@triton.jit
def uniform_from(seed, position, start, BLOCK_N: tl.constexpr):
    """u of the ids from `start`, a multiple of 4, on: from 2^-33 to 1 - 2^-24."""
    w0, w1, w2, w3 = _words(seed, position, start // 4 + tl.arange(0, BLOCK_N // 4))
    return _uniform(tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)))


@triton.jit
def uniform_at(seed, position, token):
    """u of any ids, a Philox call each."""
    w0, w1, w2, w3 = _words(seed, position, token // 4)
    odd = token % 2 == 1
    return _uniform(tl.where(token % 4 >= 2, tl.where(odd, w3, w2), tl.where(odd, w1, w0)))


@triton.jit
def gumbel(u):
    """Between -2.9 and 22.9, and at most -log(u)."""
    # -log(1 - u), with the rounding of 1 - u taken out again (Kahan's log1p).
    rest = 1.0 - u
    exponential = tl.where(rest == 1.0, u, tl.log(rest) * (u / (rest - 1.0)))
    return -tl.log(exponential)


@triton.jit
def _words(seed, position, group):
    """The four words of the ids 4 * group .. 4 * group + 3."""
    low = position.to(tl.uint32)
    high = (position >> 32).to(tl.uint32)
    return tl.philox(seed, group, low, high, 0)


@triton.jit
def _uniform(word):
    # All 32 bits count: large noise, which decides for rare ids, comes from the smallest u.
    return tl.minimum(tl.maximum(word.to(tl.float32) * 2.0**-32, 2.0**-33), 1.0 - 2.0**-24)
