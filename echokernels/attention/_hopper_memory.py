"""Shared memory of the kernels for Hopper: tiles that one warp loads by TMA and consumers use. And
how products of them lie in registers.

A ring has a few slots, each with two barriers: `full`, which completes when the bytes of a tile
have arrived, and `empty`, which completes when every consumer is done with it. The n-th use of a
ring is slot n % slots, and a barrier's phase turns over at each use of its slot. Uses are counted
over all work of a program, so the loads for the next tile start while this one is finished.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from echokernels._gluon_compat import aggregate


class Shape(NamedTuple):
    """What the kernel knows at compile time, as one constexpr."""

    head_dim: int
    block_d: int  # head_dim or the power of two above it: columns beyond head_dim are zero
    block_n: int  # keys of a tile
    slots: int  # tiles of K, and of V, on their way
    q_slots: int  # query tiles on their way
    consumers: int  # warpgroups, of BLOCK_ROWS queries each
    page_size: int  # 0: contiguous
    has_left: bool
    has_right: bool
    has_softcap: bool
    has_alibi: bool
    has_sinks: bool
    has_lse: bool
    masks_all: bool  # key tiles: code for those that need no mask is left out
    stages_output: bool  # through shared memory, and stored by TMA
    has_codes: bool  # INT8 pages, with scales
    code_slots: int  # tiles of codes on their way, of K and V in turns
    has_list: bool  # of work, made by a kernel before
    has_cu_seqlens_k: bool
    has_seqused_k: bool


BLOCK_ROWS = gl.constexpr(64)
"""Queries of a consumer: what WGMMA multiplies at once."""


KEY_LAYOUT = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
"""Of the keys of a tile, or of its pages, over a warp that loads."""


@gluon.constexpr_function
def accumulator_layout(columns):
    """Of a product of a warpgroup, all of whose columns one WGMMA multiplies."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16]
    )


@aggregate
class Ring:
    tiles: gl.shared_memory_descriptor  # [slots, rows, block_d], or i32[slots, count]
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.jit
    def tile(self, use):
        return self.tiles.index(use % self.tiles.shape[0])

    @gluon.jit
    def wait_full(self, use):
        SLOTS: gl.constexpr = self.tiles.shape[0]
        mbarrier.wait(self.full.index(use % SLOTS), (use // SLOTS) & 1)

    @gluon.jit
    def release(self, use):
        mbarrier.arrive(self.empty.index(use % self.tiles.shape[0]))

    @gluon.jit
    def wait_empty(self, use):
        SLOTS: gl.constexpr = self.tiles.shape[0]
        # A slot that was never used is free: its barrier counts as in the phase before.
        mbarrier.wait(self.empty.index(use % SLOTS), ((use // SLOTS) & 1) ^ 1)

    @gluon.jit
    def acquire(self, use, TILES: gl.constexpr = 1):
        """Waits until the slot is free. Returns the barrier that the loads into it arrive at, with
        what it waits for: as many such tiles."""
        SIZE: gl.constexpr = self.tiles.dtype.primitive_bitwidth // 8
        NUM_BYTES: gl.constexpr = TILES * self.tiles.shape[1] * self.tiles.shape[2] * SIZE
        self.wait_empty(use)
        full = self.full.index(use % self.tiles.shape[0])
        mbarrier.expect(full, NUM_BYTES)
        return full

    @gluon.jit
    def arrive_after_copies(self, use):
        """For each thread of the partition, when what it copied by cp.async has arrived."""
        full = self.full.index(use % self.tiles.shape[0])
        async_copy.mbarrier_arrive(full, increment_count=False)

    @gluon.jit
    def send(self, use, numbers):
        """Of a ring of numbers: what the loading warp tells all consumers."""
        self.wait_empty(use)
        self.tile(use).store(numbers)
        mbarrier.arrive(self.full.index(use % self.tiles.shape[0]))

    @gluon.jit
    def receive(self, use):
        """What was sent, all of it in every thread."""
        COUNT: gl.constexpr = self.tiles.shape[1]
        self.wait_full(use)
        numbers = self.tile(use).load(gl.BlockedLayout([COUNT], [32], [gl.num_warps()], [0]))
        self.release(use)
        return numbers


@aggregate
class EveryOther:
    """A ring of every other tile in a block of memory: two kinds of tiles take turns in it."""

    tiles: gl.shared_memory_descriptor  # [2 * slots, rows, block_d]
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    FIRST: gl.constexpr

    @gluon.jit
    def tile(self, use):
        return self.tiles.index(use % self.full.shape[0] * 2 + self.FIRST)

    @gluon.jit
    def wait_full(self, use):
        SLOTS: gl.constexpr = self.full.shape[0]
        mbarrier.wait(self.full.index(use % SLOTS), (use // SLOTS) & 1)

    @gluon.jit
    def release(self, use):
        mbarrier.arrive(self.empty.index(use % self.full.shape[0]))

    @gluon.jit
    def wait_empty(self, use):
        SLOTS: gl.constexpr = self.full.shape[0]
        mbarrier.wait(self.empty.index(use % SLOTS), ((use // SLOTS) & 1) ^ 1)

    @gluon.jit
    def fill(self, use):
        """Tells that the tile is there."""
        mbarrier.arrive(self.full.index(use % self.full.shape[0]))


@gluon.jit
def make_rings_in_turns(
    dtype: gl.constexpr, SLOTS: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr,
    CONSUMERS: gl.constexpr,
):  # fmt: skip
    """Two rings, of tiles that one writes in turns."""
    tiles = _make_tiles(dtype, 2 * SLOTS, ROWS, D)
    full_0, empty_0 = _make_barriers(SLOTS, CONSUMERS, 1)
    full_1, empty_1 = _make_barriers(SLOTS, CONSUMERS, 1)
    return EveryOther(tiles, full_0, empty_0, 0), EveryOther(tiles, full_1, empty_1, 1)


@gluon.jit
def make_ring(
    dtype: gl.constexpr, SLOTS: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr,
    CONSUMERS: gl.constexpr, PRODUCERS: gl.constexpr = 1,
):  # fmt: skip
    """PRODUCERS: arrivals that fill a slot."""
    tiles = _make_tiles(dtype, SLOTS, ROWS, D)
    return _with_barriers(tiles, CONSUMERS, PRODUCERS)


@gluon.jit
def make_ring_beside(ring):
    """As many tiles again, which share the barriers."""
    SLOTS: gl.constexpr = ring.tiles.shape[0]
    ROWS: gl.constexpr = ring.tiles.shape[1]
    tiles = _make_tiles(ring.tiles.dtype, SLOTS, ROWS, ring.tiles.shape[2])
    return Ring(tiles, ring.full, ring.empty)


@gluon.jit
def _make_tiles(
    dtype: gl.constexpr, SLOTS: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr
):  # fmt: skip
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], dtype)
    return gl.allocate_shared_memory(dtype, [SLOTS, ROWS, D], LAYOUT)


@gluon.jit
def make_number_ring(COUNT: gl.constexpr, CONSUMERS: gl.constexpr):
    """Of COUNT int32 a slot, for `send` and `receive`."""
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return _with_barriers(gl.allocate_shared_memory(gl.int32, [2, COUNT], LAYOUT), CONSUMERS, 1)


@gluon.jit
def number_of(numbers, I: gl.constexpr):
    """One of those that `receive` returned."""
    i = gl.arange(0, numbers.shape[0], layout=numbers.type.layout)
    return gl.sum(gl.where(i == I, numbers, 0), 0)


@gluon.jit
def _with_barriers(tiles, CONSUMERS: gl.constexpr, PRODUCERS: gl.constexpr):
    full, empty = _make_barriers(tiles.shape[0], CONSUMERS, PRODUCERS)
    return Ring(tiles, full, empty)


@gluon.jit
def _make_barriers(SLOTS: gl.constexpr, CONSUMERS: gl.constexpr, PRODUCERS: gl.constexpr):
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=PRODUCERS)
        mbarrier.init(empty.index(slot), count=CONSUMERS)
    return full, empty


@gluon.jit
def load_rows(desc, row, head, ring, use):
    """A tile of consecutive rows of one head."""
    full = ring.acquire(use)
    tile = ring.tile(use)
    ROWS: gl.constexpr = tile.shape[0]
    D: gl.constexpr = tile.shape[1]
    tma.async_copy_global_to_shared(desc, [row, head, 0], full, tile.reshape([ROWS, 1, D]))


@gluon.jit
def load_page_ids(table_ptr, tile, k_len, PAGE_SIZE: gl.constexpr, BLOCK_N: gl.constexpr):
    """The pages of a key tile of a sequence, or the page that it is a part of; 0 for those beyond
    the sequence's end."""
    COUNT: gl.constexpr = max(BLOCK_N // PAGE_SIZE, 1)
    first = tile * BLOCK_N // PAGE_SIZE
    num_pages = gl.cdiv(k_len, PAGE_SIZE)
    ids = ()
    for i in gl.static_range(COUNT):
        used = first + i < num_pages
        page = gl.load(table_ptr + first + i, mask=used, other=0).to(gl.int32)
        ids += (page,)  # type: ignore[assignment]
    return ids


@aggregate
class PageLoader:
    """Loads tiles of codes page by page, in a loop: unrolled, its code would take the place that
    the loops of converting and multiplying need in the instruction cache."""

    numbers: gl.shared_memory_descriptor  # i32[pages of a tile], of the tile that is loaded
    PAGE_SIZE: gl.constexpr
    BLOCK_N: gl.constexpr

    @gluon.jit
    def read(self, table_ptr, tile, k_len):
        """Numbers of the pages of a tile, or of the page that it is a part of; 0 for those beyond
        the sequence's end."""
        COUNT: gl.constexpr = self.numbers.shape[0]
        i = tile * self.BLOCK_N // self.PAGE_SIZE + gl.arange(0, COUNT, layout=KEY_LAYOUT)
        used = i < gl.cdiv(k_len, self.PAGE_SIZE)
        return gl.load(table_ptr + i, mask=used, other=0).to(gl.int32)

    @gluon.jit
    def load(self, desc, tile, head, ring, use):
        """The pages whose numbers were stored, one below the other."""
        COUNT: gl.constexpr = self.numbers.shape[0]
        ROWS: gl.constexpr = self.BLOCK_N // COUNT
        SLOTS: gl.constexpr = ring.tiles.shape[0]
        D: gl.constexpr = ring.tiles.shape[2]
        full = ring.acquire(use)
        # Rows of a tile lie one after another, for a row of codes is no longer than a swizzle.
        pages = ring.tiles._reinterpret(
            ring.tiles.dtype, [SLOTS * COUNT, ROWS, D], ring.tiles.layout
        )
        numbers = self.numbers._reinterpret(gl.int32, [COUNT, 1], self.numbers.layout)
        slot = tile * self.BLOCK_N % self.PAGE_SIZE if self.PAGE_SIZE > self.BLOCK_N else 0
        # Not a count that the compiler knows, or it would unroll the loop.
        for i in range(gl.minimum(head, 0) + COUNT):
            page = gl.sum(numbers.index(i).load(KEY_LAYOUT), 0)
            target = pages.index(use % SLOTS * COUNT + i).reshape([1, ROWS, 1, D])
            tma.async_copy_global_to_shared(desc, [page, slot, head, 0], full, target)


@gluon.jit
def make_page_loader(PAGE_SIZE: gl.constexpr, BLOCK_N: gl.constexpr):
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    COUNT: gl.constexpr = max(BLOCK_N // PAGE_SIZE, 1)
    numbers = gl.allocate_shared_memory(gl.int32, [COUNT], LAYOUT)
    return PageLoader(numbers, PAGE_SIZE, BLOCK_N)


@gluon.jit
def load_pages_of(table_ptr, key, k_len, PAGE_SIZE: gl.constexpr):
    """The page of each key; 0 of those beyond the sequence's end."""
    return gl.load(table_ptr + key // PAGE_SIZE, mask=key < k_len, other=0)


@gluon.jit
def load_pages(desc, ids, tile, head, target, full, PAGE_SIZE: gl.constexpr):
    """The key tile of the pages `ids`, one below the other. Arrives at the barrier `full`."""
    BLOCK_N: gl.constexpr = target.shape[0]
    D: gl.constexpr = target.shape[1]
    ROWS: gl.constexpr = min(PAGE_SIZE, BLOCK_N)
    slot = tile * BLOCK_N % PAGE_SIZE if PAGE_SIZE > BLOCK_N else 0
    parts = target.reshape([BLOCK_N // ROWS, ROWS, 1, D])
    for i in gl.static_range(BLOCK_N // ROWS):
        part = parts.slice(i, 1, 0)
        tma.async_copy_global_to_shared(desc, [ids[i], slot, head, 0], full, part)


@gluon.jit
def zero_rows(tile, valid):
    """Zeros the rows from `valid` on: a weight of 0 times NaN in unused memory would be NaN.

    Every consumer, of four warps, does it and writes what is there over the other rows: none waits
    for another.
    """
    ROWS: gl.constexpr = tile.shape[0]
    ACROSS: gl.constexpr = min(tile.shape[1] // 8, 32)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))[:, None]
    x = tile.load(layout)
    tile.store(gl.where(row < valid, x, 0.0).to(x.dtype))
    fence_async_shared()
