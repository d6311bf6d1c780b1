"""The first kernel: one read of the logits, and all of it that the second needs to know.

A row is cut into slices, one program each, and a slice into groups of neighbouring ids. How, only
the vocabulary decides: sums, and so tokens, must not depend on the batch.
"""

import triton
import triton.language as tl

from echokernels._pdl import let_next_start, wait_for_previous
from echokernels.sampling._draw import improve
from echokernels.sampling._row import (
    PER_ROW,
    best_lane,
    clean,
    is_filtered,
    limits_count,
    load_tile,
    usable,
)

# What the scratch `slices`, f32[rows, NUM_FIELDS, num_slices], tells of a slice. Numbers of
# groups and ids are exact in fp32: a vocabulary has at most 2^24.
PEAK = tl.constexpr(0)  # the largest logit
PEAK_GROUP = tl.constexpr(1)  # the first group that has it
TOTAL = tl.constexpr(2)  # sum of exp(logit - PEAK); only with HAS_LOGPROBS
MASS = tl.constexpr(3)  # sum of exp((logit - PEAK) / temperature); only where top-p needs it
BEST = tl.constexpr(4)  # largest (logit - PEAK) / temperature + noise; only in rows without filter
BEST_TOKEN = tl.constexpr(5)
NUM_FIELDS = tl.constexpr(6)


@triton.jit(do_not_specialize=PER_ROW)
def summary_kernel(
    group_peaks_ptr,  # f32[rows, num_groups], out: the largest logit of each group
    slices_ptr,  # f32[rows, NUM_FIELDS, num_slices], out
    logits_ptr,  # [rows, vocab]
    temperature_ptr,  # f32[rows]
    top_k_ptr,  # i32 or i64[rows]
    top_p_ptr,  # f32[rows]
    min_p_ptr,  # f32[rows]
    seeds_ptr,  # i64[rows]
    positions_ptr,  # i32 or i64[rows]
    vocab,
    num_groups,
    num_slices,
    logits_stride_row,
    HAS_LOGPROBS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NOISE_N: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    slice_of_row = tl.program_id(0) % num_slices
    row = (tl.program_id(0) // num_slices).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride_row
    start = slice_of_row * BLOCK_N
    fields_ptr = slices_ptr + row * (NUM_FIELDS * num_slices) + slice_of_row

    local_group = tl.arange(0, BLOCK_N // GROUP)
    token = start + local_group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    logit = tl.load(row_ptr + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    # A maximum ignores NaN where it can, so only those of groups need cleaning.
    group_peak = clean(tl.max(logit, axis=1))
    group = slice_of_row * (BLOCK_N // GROUP) + local_group
    tl.store(group_peaks_ptr + row * num_groups + group, group_peak, mask=group < num_groups)
    peak, peak_group = best_lane(group_peak, group)
    tl.store(fields_ptr + PEAK * num_slices, peak)
    tl.store(fields_ptr + PEAK_GROUP * num_slices, peak_group.to(tl.float32))

    if HAS_LOGPROBS:
        tl.store(fields_ptr + TOTAL * num_slices, _sum_exp(logit, peak, 1.0))
    draws, coldness = usable(tl.load(temperature_ptr + row))
    if draws & (peak > float("-inf")):
        top_k = tl.load(top_k_ptr + row)
        top_p = tl.load(top_p_ptr + row)
        min_p = tl.load(min_p_ptr + row)
        if (top_p < 1.0) & (limits_count(top_k, vocab) == 0):
            tl.store(fields_ptr + MASS * num_slices, _sum_exp(logit, peak, coldness))
        if is_filtered(top_k, top_p, min_p, vocab) == 0:
            seed = tl.load(seeds_ptr + row)
            position = tl.load(positions_ptr + row).to(tl.int64)
            best, best_token = _draw(
                row_ptr, start, vocab, peak, coldness, seed, position, BLOCK_N, NOISE_N
            )
            tl.store(fields_ptr + BEST * num_slices, best)
            tl.store(fields_ptr + BEST_TOKEN * num_slices, best_token.to(tl.float32))
    # Not earlier: the second kernel would take the place of slices that have yet to start.
    let_next_start(PDL)


@triton.jit
def _sum_exp(logit, peak, coldness):
    """Sum of exp((logit - peak) * coldness); 0 if all are -inf."""
    relative = clean(logit) - tl.where(peak > float("-inf"), peak, 0.0)
    return tl.sum(tl.exp(relative * coldness))


@triton.jit
def _draw(
    row_ptr,
    start,
    vocab,
    peak,
    coldness,
    seed,
    position,
    BLOCK_N: tl.constexpr,
    NOISE_N: tl.constexpr,
):
    """(largest score plus noise, its id) of the slice.

    It is read again, a part at a time: all its noise at once would fill the registers, and so slow
    the rows that need none.
    """
    best, best_token = tl.full([], float("-inf"), tl.float32), tl.full([], 0, tl.int32)
    for part in range(start, start + BLOCK_N, NOISE_N):
        _, logit = load_tile(row_ptr, part, vocab, NOISE_N)
        score = (logit - peak) * coldness
        best, best_token = improve(best, best_token, score, seed, position, part, NOISE_N)
    return best, best_token
