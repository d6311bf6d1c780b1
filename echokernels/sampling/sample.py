"""Sampling of one token per row of logits.

    token = argmax over the allowed ids i of (logit_i - max) / temperature + g_i

With Gumbel noise g_i = -log(-log(1 - u_i)) this draws an id with its softmax probability among the
allowed ones (Gumbel, 1954; Maddison et al., "A* Sampling", 2014). u_i is one of the four 32-bit
words of Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011) with the
row's seed as key and (id // 4, position) as counter. So a row's token depends on its own arguments
alone, never on the batch around it.

Filters apply after the temperature, each to what the one before has left; what ties with the last
id kept is kept too, and the most likely id always:
  top_k  ids with at least the k-th largest logit; <= 0 or >= vocab keeps all
  top_p  the smallest set of most likely ids with this share of the mass; <= 0 keeps the most likely
         id, >= 1 keeps all
  min_p  ids at least min_p times as likely as the most likely one
A temperature of 0, or below 2^-126 (fp32 may flush it to 0), is greedy: the largest logit, the
lowest id on ties.

A NaN logit counts as -inf, and +inf as the largest finite fp32 number. A row with nothing above
-inf gives token 0 and, as if all its logits were equal, logprob -log(vocab).

logits [rows, vocab], all else [rows]. Arithmetic and sums are in fp32. Mutates tokens and logprobs.
"""

import torch
import triton
import triton.language as tl

from echokernels._checks import (
    FLOATS,
    INDEX,
    check_dim,
    check_dtype,
    check_last_contiguous,
    check_same_device,
    check_shape,
)
from echokernels._launch import launch
from echokernels._library import define_op
from echokernels._tuning import TileConfig, select
from echokernels.sampling import reference
from echokernels.sampling._row import argmax, best_lane, keep_better, load_tile, log_softmax_at
from echokernels.sampling._threshold import find_threshold, key_of

_GREEDY_BELOW = tl.constexpr(reference.GREEDY_BELOW)
_NEGLIGIBLE = tl.constexpr(reference.NEGLIGIBLE)

# An fp32 number that came from a half has this many low bits that tell nothing.
_KEY_SHIFT = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
# fp32, in which ids are counted, is exact up to here.
_MAX_VOCAB = 2**24


@triton.jit
def _gumbel(seed, position, start, BLOCK_N: tl.constexpr):
    """Noise of the ids from `start` on, between -2.9 and 22.9."""
    group = start // 4 + tl.arange(0, BLOCK_N // 4)
    low = position.to(tl.uint32)
    high = (position >> 32).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, group, low, high, 0)
    word = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    # All 32 bits count: large noise, which decides for rare ids, comes from the smallest u.
    u = tl.minimum(tl.maximum(word.to(tl.float32) * 2.0**-32, 2.0**-33), 1.0 - 2.0**-24)
    # -log(1 - u), with the rounding of 1 - u taken out again (Kahan's log1p).
    rest = 1.0 - u
    exponential = tl.where(rest == 1.0, u, tl.log(rest) * (u / (rest - 1.0)))
    return -tl.log(exponential)


@triton.jit
def _draw(
    row_ptr,
    vocab,
    peak,
    temperature,
    threshold,  # i32 key
    min_p,
    seed,
    position,
    KEY_SHIFT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The id whose score plus noise is largest among those that the filters allow."""
    # Noise spans less than 26: an id this unlikely loses to the most likely one in any case.
    cutoff = tl.log(tl.minimum(tl.maximum(min_p, _NEGLIGIBLE), 1.0))
    best = tl.full([BLOCK_N], float("-inf"), tl.float32)
    best_token = tl.zeros([BLOCK_N], tl.int32)
    for start in range(0, vocab, BLOCK_N):
        token, logit = load_tile(row_ptr, start, vocab, BLOCK_N)
        score = (logit - peak) / temperature
        allowed = (key_of(logit, KEY_SHIFT) >= threshold) & (score >= cutoff)
        # Noise costs more than all else, and once a filter is on few tiles need any.
        if tl.max(allowed.to(tl.int32), axis=0) > 0:
            score += _gumbel(seed, position, start, BLOCK_N)
            score = tl.where(allowed, score, float("-inf"))
            best, best_token = keep_better(best, best_token, score, token)
    _, token = best_lane(best, best_token)
    return token


@triton.jit(
    # Only scalars are read through these: slices of a packed buffer must not recompile the kernel.
    do_not_specialize=[
        "tokens_ptr",
        "logprobs_ptr",
        "temperature_ptr",
        "top_k_ptr",
        "top_p_ptr",
        "min_p_ptr",
        "seeds_ptr",
        "positions_ptr",
    ]
)
def _sample_kernel(
    tokens_ptr,  # i32 or i64[rows], out
    logprobs_ptr,  # f32[rows], out; unused without HAS_LOGPROBS
    logits_ptr,  # [rows, vocab]
    temperature_ptr,  # f32[rows]
    top_k_ptr,  # i32 or i64[rows]
    top_p_ptr,  # f32[rows]
    min_p_ptr,  # f32[rows]
    seeds_ptr,  # i64[rows]
    positions_ptr,  # i32 or i64[rows]
    vocab,
    logits_stride_row,
    HAS_LOGPROBS: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride_row
    peak, token, common = argmax(row_ptr, vocab, BLOCK_N)
    temperature = tl.load(temperature_ptr + row)
    if (temperature >= _GREEDY_BELOW) & (peak > float("-inf")):
        # NVIDIA's fast division gives NaN for -inf over more than this.
        temperature = tl.minimum(temperature, 2.0**126)
        top_k = tl.load(top_k_ptr + row).to(tl.int64)
        top_p = tl.load(top_p_ptr + row)
        threshold = find_threshold(
            row_ptr, vocab, peak, common, temperature, top_k, top_p, KEY_SHIFT, BLOCK_N
        ).to(tl.int32)
        min_p = tl.load(min_p_ptr + row)
        seed = tl.load(seeds_ptr + row)
        position = tl.load(positions_ptr + row).to(tl.int64)
        token = _draw(
            row_ptr, vocab, peak, temperature, threshold, min_p, seed, position, KEY_SHIFT, BLOCK_N
        )
    tl.store(tokens_ptr + row, token.to(tokens_ptr.dtype.element_ty))
    if HAS_LOGPROBS:
        tl.store(logprobs_ptr + row, log_softmax_at(row_ptr, vocab, peak, token, BLOCK_N))


def _config(vocab: int) -> TileConfig:
    # The choice ignores the batch: sums, and so tokens, must not depend on it.
    block_n = min(max(triton.next_power_of_2(vocab), 128), 4096)
    # One program a row: 8 elements a thread leave a small batch enough warps to hide latency.
    return TileConfig(1, block_n, num_warps=max(block_n // 256, 1))


def _check(
    tokens: torch.Tensor,
    logprobs: torch.Tensor | None,
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    check_dim("logits", logits, 2)
    check_dtype("logits", logits, FLOATS)
    check_last_contiguous("logits", logits)
    rows, vocab = logits.shape
    if not 1 <= vocab <= _MAX_VOCAB:
        raise ValueError(
            f"logits.shape is {tuple(logits.shape)}, "
            f"must have a last dimension from 1 to {_MAX_VOCAB}"
        )
    per_row = {
        "tokens": (tokens, INDEX),
        "logprobs": (logprobs, (torch.float32,)),
        "temperature": (temperature, (torch.float32,)),
        "top_k": (top_k, INDEX),
        "top_p": (top_p, (torch.float32,)),
        "min_p": (min_p, (torch.float32,)),
        "seeds": (seeds, (torch.int64,)),
        "positions": (positions, INDEX),
    }
    for name, (tensor, dtypes) in per_row.items():
        if tensor is not None:
            check_shape(name, tensor, rows)
            check_dtype(name, tensor, dtypes)
            check_last_contiguous(name, tensor)
    tensors = {name: tensor for name, (tensor, _) in per_row.items()}
    check_same_device("logits", logits, **tensors)


def _launch(
    tokens: torch.Tensor,
    logprobs: torch.Tensor | None,
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    rows, vocab = logits.shape
    config = select("sample", vocab, lambda: _config(vocab))
    launch(
        _sample_kernel,
        (rows,),
        tokens,
        temperature if logprobs is None else logprobs,
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        seeds,
        positions,
        vocab,
        logits.stride(0),
        HAS_LOGPROBS=logprobs is not None,
        KEY_SHIFT=_KEY_SHIFT[logits.dtype],
        BLOCK_N=config.block_n,
        num_warps=config.num_warps,
    )


_sample = define_op(
    "sample(Tensor(a!) tokens, Tensor(b!)? logprobs, Tensor logits, Tensor temperature, "
    "Tensor top_k, Tensor top_p, Tensor min_p, Tensor seeds, Tensor positions) -> ()",
    check=_check,
    triton=_launch,
    reference=reference.sample,
)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    tokens: torch.Tensor | None = None,
    logprobs: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draws one token id per row of `logits`; the module's docstring tells how, and the edges.

    logits: [rows, vocab], fp16, bf16 or fp32, last dimension contiguous, any row stride. The others
    are [rows]: temperature, top_p and min_p fp32, top_k and positions int32 or int64, seeds int64
    (any 64 bits). A filter that is None is off. `positions` are the places of the drawn tokens in
    their sequences; rows with equal seed and position have equal noise. `logprobs`, fp32, receives
    the log-softmax of the raw logits (before temperature and filters) at the drawn ids.
    Returns `tokens`, int32 or int64; allocated as int64 unless given.
    Raises ValueError or TypeError for shapes, strides, devices or dtypes that do not fit.
    """
    rows = logits.shape[:1]
    if tokens is None:
        tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if top_k is None:
        top_k = torch.zeros(rows, dtype=torch.int32, device=logits.device)
    if top_p is None:
        top_p = torch.ones(rows, device=logits.device)
    if min_p is None:
        min_p = torch.zeros(rows, device=logits.device)
    _sample(tokens, logprobs, logits, temperature, top_k, top_p, min_p, seeds, positions)
    return tokens
