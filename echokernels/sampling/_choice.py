"""The second kernel: one program a row, which chooses the token from what the first found out."""

import triton
import triton.language as tl

from echokernels._pdl import let_next_start, wait_for_previous
from echokernels.sampling import _summary
from echokernels.sampling._candidates import MAX_LISTED, find_floor, list_groups, list_ids
from echokernels.sampling._draw import draw_from_list, draw_from_row
from echokernels.sampling._row import (
    NO_TOKEN,
    PER_ROW,
    below,
    best_lane,
    clean,
    is_filtered,
    limits_count,
    sum_of_products,
    usable,
)
from echokernels.sampling._threshold import find_threshold

_PEAK, _PEAK_GROUP = _summary.PEAK, _summary.PEAK_GROUP
_TOTAL, _MASS = _summary.TOTAL, _summary.MASS
_BEST, _BEST_TOKEN = _summary.BEST, _summary.BEST_TOKEN
_NUM_FIELDS = _summary.NUM_FIELDS
# A list this short, an id a thread, is dealt with in a fraction of the time.
_SHORT = tl.constexpr(256)
NUM_LISTS = tl.constexpr(3)


@triton.jit(do_not_specialize=["tokens_ptr", "logprobs_ptr", *PER_ROW])
def choice_kernel(
    tokens_ptr,  # i32 or i64[rows], out
    logprobs_ptr,  # f32[rows], out; unused without HAS_LOGPROBS
    lists_ptr,  # f32[rows, NUM_LISTS, MAX_LISTED], scratch: groups, ids and their logits
    group_peaks_ptr,  # f32[rows, num_groups]
    slices_ptr,  # f32[rows, NUM_FIELDS, num_slices]
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
    KEY_SHIFT: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,  # power of two, at least num_groups
    SLICES: tl.constexpr,  # power of two, at least num_slices
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride_row
    fields_ptr = slices_ptr + row * (_NUM_FIELDS * num_slices) + tl.arange(0, SLICES)
    inside = tl.arange(0, SLICES) < num_slices
    slice_peak = tl.load(fields_ptr + _PEAK * num_slices, mask=inside, other=float("-inf"))
    let_next_start(PDL)
    peak = tl.max(slice_peak, axis=0)
    relative = below(slice_peak, peak)
    used = slice_peak > float("-inf")

    token = tl.full([], 0, tl.int32)
    draws, coldness = usable(tl.load(temperature_ptr + row))
    if draws & (peak > float("-inf")):
        top_k = tl.load(top_k_ptr + row)
        top_p = tl.load(top_p_ptr + row)
        min_p = tl.load(min_p_ptr + row)
        if is_filtered(top_k, top_p, min_p, vocab):
            limited = limits_count(top_k, vocab)
            mass = tl.full([], 0.0, tl.float32)
            if (top_p < 1.0) & (limited == 0):
                mass_of_slice = tl.load(fields_ptr + _MASS * num_slices, mask=used, other=0.0)
                mass = sum_of_products(mass_of_slice, tl.exp(relative * coldness))
            token = _draw_filtered(
                row_ptr,
                lists_ptr + row * (NUM_LISTS * MAX_LISTED),
                group_peaks_ptr + row * num_groups,
                vocab,
                num_groups,
                peak,
                coldness,
                limited,
                top_k,
                top_p,
                min_p,
                mass,
                tl.load(seeds_ptr + row),
                tl.load(positions_ptr + row).to(tl.int64),
                KEY_SHIFT,
                GROUP,
                GROUPS,
                BLOCK_N,
            )
        else:
            best = tl.load(fields_ptr + _BEST * num_slices, mask=used, other=float("-inf"))
            best_token = tl.load(fields_ptr + _BEST_TOKEN * num_slices, mask=used, other=0.0)
            _, token = best_lane(best + relative * coldness, best_token.to(tl.int32))
    elif peak > float("-inf"):
        group = tl.load(fields_ptr + _PEAK_GROUP * num_slices, mask=inside, other=0.0)
        _, peak_group = best_lane(slice_peak, group.to(tl.int32))
        member = peak_group * GROUP + tl.arange(0, GROUP)
        logit = clean(tl.load(row_ptr + member, mask=member < vocab, other=float("-inf")))
        token = tl.min(tl.where(logit == peak, member, NO_TOKEN), axis=0)
    tl.store(tokens_ptr + row, token.to(tokens_ptr.dtype.element_ty))
    if HAS_LOGPROBS:
        total = tl.load(fields_ptr + _TOTAL * num_slices, mask=inside, other=0.0)
        total = sum_of_products(total, tl.exp(relative))
        # As if all logits were equal where none is above -inf.
        total = tl.where(peak > float("-inf"), total, vocab)
        chosen = below(clean(tl.load(row_ptr + token)), peak)
        tl.store(logprobs_ptr + row, chosen - tl.log(total))


@triton.jit
def _draw_filtered(
    row_ptr,
    lists_ptr,
    group_peaks_ptr,
    vocab,
    num_groups,
    peak,
    coldness,
    limited,
    top_k,
    top_p,
    min_p,
    mass,
    seed,
    position,
    KEY_SHIFT: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The winner of the ids that the filters keep: from a list if they are few, else from all."""
    group = tl.arange(0, GROUPS)
    group_peak = tl.load(group_peaks_ptr + group, mask=group < num_groups, other=float("-inf"))
    floor = find_floor(
        group_peak, num_groups, peak, coldness, limited, top_k, top_p, min_p, mass, vocab, KEY_SHIFT
    )
    groups_ptr, ids_ptr, logits_ptr = lists_ptr, lists_ptr + MAX_LISTED, lists_ptr + 2 * MAX_LISTED
    count = list_groups(groups_ptr, group_peak, floor, KEY_SHIFT)
    if count <= MAX_LISTED:
        tl.debug_barrier()  # the list, written by other threads, is read
        count = list_ids(
            ids_ptr, logits_ptr, groups_ptr, count, row_ptr, vocab, floor,
            KEY_SHIFT, GROUP, BLOCK_N // 2,
        )  # fmt: skip
        tl.debug_barrier()
    token = tl.full([], 0, tl.int32)
    if count <= _SHORT:
        token = draw_from_list(
            ids_ptr, logits_ptr, count, floor, peak, coldness, limited, top_k, top_p, min_p, mass,
            seed, position, KEY_SHIFT, _SHORT,
        )  # fmt: skip
    elif count <= MAX_LISTED:
        token = draw_from_list(
            ids_ptr, logits_ptr, count, floor, peak, coldness, limited, top_k, top_p, min_p, mass,
            seed, position, KEY_SHIFT, MAX_LISTED,
        )  # fmt: skip
    else:
        threshold = find_threshold(
            row_ptr, vocab, peak, floor, coldness, limited, top_k, top_p, mass, KEY_SHIFT, BLOCK_N
        ).to(tl.int32)
        token = draw_from_row(
            row_ptr, vocab, peak, coldness, threshold, min_p, seed, position, KEY_SHIFT, BLOCK_N
        )
    return token
