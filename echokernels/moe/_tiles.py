"""Tiles of an expert's rows by its weight's rows: how many there may be, and in which order."""

import triton
import triton.language as tl


@triton.jit
def place_of(place, row_tiles, column_tiles, group):
    """(row tile, column tile) of an expert's tile: groups of row tiles walk along the columns. Of
    an expert without tiles anything."""
    group = tl.maximum(tl.minimum(group, row_tiles), 1)
    first = place // (group * column_tiles) * group
    size = tl.maximum(tl.minimum(row_tiles - first, group), 1)
    within = place - first * column_tiles
    return first + within % size, within // size


def most_row_tiles(num_rows: int, num_experts: int, block: int) -> int:
    """That experts can have together, whatever rows are whose."""
    return min(num_rows, num_experts) + max(num_rows - num_experts, 0) // block
