"""Key tiles of pages that TMA cannot put together: copied row by row, by four warps.

The copies do not wait either (cp.async), and arrive at the same barriers of the same rings.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from echokernels._gluon_compat import aggregate
from echokernels.attention._hopper_memory import load_pages_of

THREADS = gl.constexpr(128)
"""That copy, each of which arrives at the barrier of a tile."""


@aggregate
class Pages:
    """Of K or V. Strides in units of 16 bytes, what a copy takes."""

    ptr: gl.tensor
    stride_page: gl.tensor
    stride_slot: gl.tensor
    stride_head: gl.tensor


@gluon.jit
def produce_by_copies(k_pages, v_pages, k_ring, v_ring, scales, seq, tile, left, call):
    """Loads the tiles of a share."""
    S: gl.constexpr = call.S
    N: gl.constexpr = S.block_n
    D: gl.constexpr = S.block_d
    UNIT: gl.constexpr = 16 if S.has_codes else 8
    ACROSS: gl.constexpr = min(D // UNIT, 32)
    layout: gl.constexpr = gl.BlockedLayout([1, UNIT], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    row = gl.arange(0, N, layout=gl.SliceLayout(1, layout))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, layout))[None, :]
    kv_head = gl.program_id(0) % call.kv_heads
    used = 0
    while left > 0:
        _, q_len, k_len = call.lengths(seq, seq < call.num_seqs)
        first, tiles = call.key_tiles(q_len, k_len)
        table_ptr = call.table_ptr + seq.to(gl.int64) * call.table_stride
        count = gl.minimum(tiles - tile, left)
        key = (first + tile) * N + row
        page = load_pages_of(table_ptr, key, k_len, S.page_size)
        for _ in range(count):
            # The table is read while the tile before waits for its place.
            next_key = key + N
            next_page = load_pages_of(table_ptr, next_key, k_len, S.page_size)
            slot = key % S.page_size
            seen = (key < k_len)[:, None] & (d < S.head_dim)
            k_ring.wait_empty(used)
            if S.has_codes:
                _copy(k_pages, page, slot, kv_head, d, seen, k_ring.tile(used), UNIT)
                _copy(v_pages, page, slot, kv_head, d, seen, v_ring.tile(used), UNIT)
                scales.copy_k(used, page, slot, kv_head, key < k_len)
                scales.copy_v(used, page, slot, kv_head, key < k_len)
                k_ring.arrive_after_copies(used)
            else:
                _copy(k_pages, page, slot, kv_head, d, seen, k_ring.tile(used), UNIT)
                k_ring.arrive_after_copies(used)
                v_ring.wait_empty(used)
                _copy(v_pages, page, slot, kv_head, d, seen, v_ring.tile(used), UNIT)
                v_ring.arrive_after_copies(used)
            key = next_key
            page = next_page
            used += 1
        left -= count
        tile = 0
        seq += 1


@gluon.jit
def _copy(pages, page, slot, head, d, seen, tile, UNIT: gl.constexpr):
    """Rows that are not seen are zeros."""
    at = page.to(gl.int64) * pages.stride_page + slot.to(gl.int64) * pages.stride_slot
    at += head.to(gl.int64) * pages.stride_head
    async_copy.async_copy_global_to_shared(tile, pages.ptr + (at * UNIT)[:, None] + d, mask=seen)
