"""Jit pieces that find the few ids of a row that its filters may keep, and write them down.

A floor under what they keep follows from the largest logits of the groups alone: if k groups have
theirs above a logit, so are k ids; if the largest logits above it hold the share of top-p, so do
all above it. Only groups that reach the floor are read again, and they are few where k is small or
the distribution has a peak.
"""

import triton
import triton.language as tl

from echokernels.sampling._keys import key_of, search
from echokernels.sampling._row import MAX_FLOAT, NEGLIGIBLE, clean

MAX_LISTED = tl.constexpr(2048)
"""The most groups, and the most ids, that are written down; rows with more are read as a whole."""

_BUCKETS = tl.constexpr(1024)
# A good floor will do: an eighth too much is not worth another round of the search.
_SLACK = tl.constexpr(1.125)


@triton.jit
def find_floor(
    group_peak,  # f32[GROUPS], -inf from num_groups on
    num_groups,
    peak,
    coldness,
    limited,  # whether top_k is a limit
    top_k,
    top_p,
    min_p,
    mass,  # of the whole row; needed where top_p is the first limit
    vocab,
    KEY_SHIFT: tl.constexpr,
):
    """An i32 key, above that of -inf, that every id reaches which the filters keep and can win."""
    least = tl.minimum(tl.maximum(min_p, NEGLIGIBLE), 1.0)
    if limited & (top_p < 1.0):
        # Ids that min_p drops count in the mass of which top_p takes its share.
        least = tl.full([], NEGLIGIBLE, tl.float32)
    elif top_p < 1.0:
        # All ids lighter than this together weigh less than what top_p drops. The factor 2 is a
        # margin for rounding.
        lightest = (1.0 - tl.maximum(top_p, 0.0)) * mass / (2.0 * vocab)
        least = tl.minimum(tl.maximum(least, lightest), 1.0)
    floor = key_of(tl.maximum(peak + tl.log(least) / coldness, -MAX_FLOAT), KEY_SHIFT)
    if limited | (top_p < 1.0):
        target = tl.where(limited, top_k.to(tl.float32), tl.maximum(top_p * mass, 1.0))
        floor = _raise(group_peak, num_groups, peak, coldness, limited, floor, target, KEY_SHIFT)
    return floor


@triton.jit
def _raise(group_peak, num_groups, peak, coldness, limited, floor, target, KEY_SHIFT: tl.constexpr):
    """A higher floor, if the largest logits that reach it weigh `target`: 1 each if limited."""
    GROUPS: tl.constexpr = group_peak.shape[0]
    BUCKETS: tl.constexpr = min(GROUPS, _BUCKETS)
    end = key_of(peak, KEY_SHIFT) + 1
    found = floor
    # Every 1,024th group makes a bucket; their maxima take an eighth of the time. They will do
    # where few of the logits that count share one.
    if (limited == 0) | (2 * target <= tl.minimum(num_groups, BUCKETS)):
        bucket_peak = tl.max(tl.reshape(group_peak, [GROUPS // BUCKETS, BUCKETS]), axis=0)
        key = key_of(bucket_peak, KEY_SHIFT)
        if limited:
            used = tl.arange(0, BUCKETS) < num_groups
            floor = tl.maximum(floor, tl.min(tl.where(used, key, end - 1), axis=0))
        weight = tl.where(limited, 1.0, tl.exp((bucket_peak - peak) * coldness))
        found = search(key, weight, floor, end, target, _SLACK)
    if found == floor:
        key = key_of(group_peak, KEY_SHIFT)
        weight = tl.where(limited, 1.0, tl.exp((group_peak - peak) * coldness))
        found = search(key, weight, floor, end, target, _SLACK)
    return found


@triton.jit
def list_groups(groups_ptr, group_peak, floor, KEY_SHIFT: tl.constexpr):
    """Writes the groups that reach `floor`, at most MAX_LISTED, as fp32. Returns how many do."""
    group = tl.arange(0, group_peak.shape[0])
    place, mask, count = _places(key_of(group_peak, KEY_SHIFT) >= floor, 0)
    tl.store(groups_ptr + place, group.to(tl.float32), mask=mask)
    return count


@triton.jit
def list_ids(
    ids_ptr,
    logits_ptr,
    groups_ptr,  # f32[num_groups], as list_groups wrote it
    num_groups,
    row_ptr,
    vocab,
    floor,
    KEY_SHIFT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Writes the ids of these groups that reach `floor`, and their logits, at most MAX_LISTED, as
    fp32. Returns how many do.
    """
    CHUNK: tl.constexpr = BLOCK_N // GROUP
    count = 0
    for start in range(0, num_groups, CHUNK):
        slot = start + tl.arange(0, CHUNK)
        group = tl.load(groups_ptr + slot, mask=slot < num_groups, other=0.0).to(tl.int32)
        token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        mask = (slot < num_groups)[:, None] & (token < vocab)
        logit = clean(tl.load(row_ptr + token, mask=mask, other=float("-inf")))
        logit = tl.reshape(logit, [BLOCK_N])
        place, mask, count = _places(key_of(logit, KEY_SHIFT) >= floor, count)
        tl.store(ids_ptr + place, tl.reshape(token, [BLOCK_N]).to(tl.float32), mask=mask)
        tl.store(logits_ptr + place, logit, mask=mask)
    return count


@triton.jit
def _places(chosen, count):
    """(places behind the first `count` for those chosen, in order, which have one, new count)."""
    place = count + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    new_count = count + tl.sum(chosen.to(tl.int32), axis=0)
    return place, chosen & (place < MAX_LISTED), new_count
