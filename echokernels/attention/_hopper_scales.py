"""Scales of codes, which loading warps copy beside the key tiles, so that those who need them find
them in shared memory: to read a page's number and then its scales would be two waits a tile.

The copies (cp.async) arrive at the barrier of the codes.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from echokernels._gluon_compat import aggregate
from echokernels.attention._hopper_memory import KEY_LAYOUT, load_pages_of


@aggregate
class Scales:
    """Of K and V: where they are, f32[num_pages, page_size, kv_heads], and where they go,
    f32[slots, block_n]."""

    k_ptr: gl.tensor
    k_stride_page: gl.tensor
    k_stride_slot: gl.tensor
    k_stride_head: gl.tensor
    v_ptr: gl.tensor
    v_stride_page: gl.tensor
    v_stride_slot: gl.tensor
    v_stride_head: gl.tensor
    k_tiles: gl.shared_memory_descriptor
    v_tiles: gl.shared_memory_descriptor

    @gluon.jit
    def copy_k(self, use, page, slot, head, exists):
        """page, slot: of each key of a tile. The scales of those that do not exist are 0."""
        steps = self.k_stride_page, self.k_stride_slot, self.k_stride_head
        _copy(self.k_ptr, steps, self.k_tiles, use, page, slot, head, exists)

    @gluon.jit
    def copy_v(self, use, page, slot, head, exists):
        steps = self.v_stride_page, self.v_stride_slot, self.v_stride_head
        _copy(self.v_ptr, steps, self.v_tiles, use, page, slot, head, exists)


@gluon.jit
def _copy(ptr, steps, tiles, use, page, slot, head, exists):
    step_page, step_slot, step_head = steps
    at = page.to(gl.int64) * step_page + slot.to(gl.int64) * step_slot
    at += head.to(gl.int64) * step_head
    tile = tiles.index(use % tiles.shape[0])
    async_copy.async_copy_global_to_shared(tile, ptr + at, mask=exists)


@gluon.jit
def make_scale_tiles(SLOTS: gl.constexpr, BLOCK_N: gl.constexpr):
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return gl.allocate_shared_memory(gl.float32, [SLOTS, BLOCK_N], LAYOUT)


@gluon.jit
def produce_scales(scales, ring, seq, tile, left, call):
    """Copies the scales of the key tiles of a share."""
    S: gl.constexpr = call.S
    N: gl.constexpr = S.block_n
    kv_head = gl.program_id(0) % call.kv_heads
    number = gl.arange(0, N, layout=KEY_LAYOUT)
    used = 0
    while left > 0:
        _, q_len, k_len = call.lengths(seq, seq < call.num_seqs)
        first, num_tiles = call.key_tiles(q_len, k_len)
        table_ptr = call.table_ptr + seq.to(gl.int64) * call.table_stride
        count = gl.minimum(num_tiles - tile, left)
        key = (first + tile) * N + number
        page = load_pages_of(table_ptr, key, k_len, S.page_size)
        for _ in range(count):
            next_page = load_pages_of(table_ptr, key + N, k_len, S.page_size)
            slot = key % S.page_size
            ring.wait_empty(used)
            scales.copy_k(used, page, slot, kv_head, key < k_len)
            scales.copy_v(used, page, slot, kv_head, key < k_len)
            ring.arrive_after_copies(used)
            key += N
            page = next_page
            used += 1
        left -= count
        tile = 0
        seq += 1
