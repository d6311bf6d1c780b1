"""The Hopper prefill from INT8 pages: codes become keys and values on their way to the consumers.

A warp loads codes as it would load keys and values, another their scales, and four convert: what
goes to the rings that the consumers read is code times scale in fp16, whatever the dtype of the
queries, for a byte becomes an fp16 in fewer instructions than anything else, and no worse one. The
range that fp16 lacks is made up for by a power of two for each key tile, and for each value tile
(`Units`). So an element is converted once for all queries of a tile, beside the products and not
between them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from echokernels._gluon_compat import aggregate
from echokernels.attention._hopper_memory import BLOCK_ROWS, load_pages_of
from echokernels.attention._hopper_work import key_tiles, receive_work

# The exponents of fp32 within which units are kept, those of the least scale (1e-12) and above.
_LEAST_EXPONENT = gl.constexpr(60)
_MOST_EXPONENT = gl.constexpr(220)
# Scales of a tile over a warp, four of a page to a thread.
_FOURS = gl.constexpr(gl.BlockedLayout([1, 4], [32, 1], [1, 1], [1, 0]))
# The largest scale of a tile becomes 2^7 to 2^8, and with a code less than 2^15.
_SCALE_EXPONENT = gl.constexpr(7)
# And the largest element of a query 2^14 to 2^15.
_QUERY_EXPONENT = gl.constexpr(14)


@aggregate
class Unit:
    """What the elements of a tile in fp16 are multiples of."""

    of_keys: gl.tensor
    log2_of_values: gl.tensor


@aggregate
class Scales:
    """Of K and V: where they are, f32[num_pages, page_size, kv_heads], and where they go in units
    of their tile's, with these."""

    k_ptr: gl.tensor
    k_stride_page: gl.tensor
    k_stride_slot: gl.tensor
    k_stride_head: gl.tensor
    v_ptr: gl.tensor
    v_stride_page: gl.tensor
    v_stride_slot: gl.tensor
    v_stride_head: gl.tensor
    tiles: gl.shared_memory_descriptor  # f16[slots of codes, block_n]
    units: gl.shared_memory_descriptor  # f32[slots, 2]

    @gluon.jit
    def tile(self, use):
        """Of a use of the ring of codes."""
        return self.tiles.index(use % self.tiles.shape[0])

    @gluon.jit
    def load(self, page, slot, head, exists):
        """(of K, of V) of the keys of a tile, four of a page to a thread; 0 of those that do not
        exist."""
        k_steps = self.k_stride_page, self.k_stride_slot, self.k_stride_head
        v_steps = self.v_stride_page, self.v_stride_slot, self.v_stride_head
        k_scale = _load(self.k_ptr, k_steps, page, slot, head, exists)
        return k_scale, _load(self.v_ptr, v_steps, page, slot, head, exists)

    @gluon.jit
    def unit(self, use):
        """Of a use of the rings of keys and values."""
        layout: gl.constexpr = gl.BlockedLayout([2], [32], [gl.num_warps()], [0])
        x = self.units.index(use % self.units.shape[0]).load(layout)
        i = gl.arange(0, 2, layout=layout)
        return Unit(gl.sum(gl.where(i == 0, x, 0.0), 0), gl.sum(gl.where(i == 1, x, 0.0), 0))


@gluon.jit
def _load(ptr, steps, page, slot, head, exists):
    step_page, step_slot, step_head = steps
    at = page.to(gl.int64) * step_page + slot.to(gl.int64) * step_slot
    ptrs = (ptr + head.to(gl.int64) * step_head + at)[:, None]
    i = gl.arange(0, 4, layout=gl.SliceLayout(0, _FOURS))[None, :]
    return gl.load(ptrs + i.to(gl.int64) * step_slot, mask=exists, other=0.0)


@gluon.jit
def make_scale_memory(CODE_SLOTS: gl.constexpr, SLOTS: gl.constexpr, BLOCK_N: gl.constexpr):
    """(tiles, units) of Scales. A unit is there before its codes are converted, and read after it:
    for as many key tiles as the ring of codes and that of keys hold."""
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    UNITS: gl.constexpr = (CODE_SLOTS + 1) // 2 + SLOTS
    tiles = gl.allocate_shared_memory(gl.float16, [CODE_SLOTS, BLOCK_N], LAYOUT)
    return tiles, gl.allocate_shared_memory(gl.float32, [UNITS, 2], LAYOUT)


@gluon.jit
def prepare_scales(works, codes, scales, call):
    """Of every item that the loading warp takes, by one warp. They arrive with the codes."""
    S: gl.constexpr = call.S
    N: gl.constexpr = S.block_n
    number = 4 * gl.arange(0, N // 4, layout=gl.SliceLayout(1, _FOURS))
    k_next = gl.zeros([N // 4, 4], gl.float32, _FOURS)
    v_next = k_next
    used = 0
    turn = 0
    work = receive_work(works, turn)
    while work.seq >= 0:
        kv_head = work.head // call.group
        table_ptr = call.table_ptr + work.seq.to(gl.int64) * call.table_stride
        begin, end = key_tiles(call, work)
        key = (end - 1) * N + number
        page = load_pages_of(table_ptr, key, work.k_len, S.page_size)
        for i in range(end - begin + 1):
            # Of the tile to come, and pages of the one after it: their latencies would add up.
            k_scale, v_scale = k_next, v_next
            exist = _fours(key) < work.k_len
            k_next, v_next = scales.load(page, key % S.page_size, kv_head, exist)
            key = gl.maximum(key - N, number)
            page = load_pages_of(table_ptr, key, work.k_len, S.page_size)
            if i > 0:
                _send(codes, scales, used, k_scale, v_scale)
                used += 1
        turn += 1
        work = receive_work(works, turn)


@gluon.jit
def _fours(key):
    """All keys, of each first of four."""
    return key[:, None] + gl.arange(0, 4, layout=gl.SliceLayout(0, _FOURS))[None, :]


@gluon.jit
def _send(codes, scales, used, k_scale, v_scale):
    """The scales of a key tile in units, and these."""
    k_exponent = _exponent(k_scale)
    v_exponent = _exponent(v_scale)
    i = gl.arange(0, 2, layout=gl.BlockedLayout([2], [32], [1], [0]))
    log2_of_values = (v_exponent - (127 + _SCALE_EXPONENT)).to(gl.float32)
    unit = gl.where(i == 0, _power_of_2(k_exponent - _SCALE_EXPONENT), log2_of_values)
    codes.wait_empty(2 * used)
    scales.units.index(used % scales.units.shape[0]).store(unit)
    _store(codes, scales, 2 * used, k_scale, k_exponent)
    codes.wait_empty(2 * used + 1)
    _store(codes, scales, 2 * used + 1, v_scale, v_exponent)


@gluon.jit
def _store(codes, scales, use, x, exponent):
    """The largest becomes 2^_SCALE_EXPONENT and more, less than twice as much."""
    x = (x * _power_of_2(2 * 127 + _SCALE_EXPONENT - exponent)).to(gl.float16)
    scales.tile(use).store(gl.reshape(x, [x.shape[0] * 4]))
    mbarrier.arrive(codes.full.index(use % codes.tiles.shape[0]))


@gluon.jit
def _exponent(scales):
    """That of the largest scale, as fp32 has it: those that are not finite do not count."""
    bits = scales.to(gl.int32, bitcast=True)
    exponent = gl.max(gl.max(gl.where(bits < 0x7F800000, bits, 0), 1), 0) >> 23
    return gl.minimum(gl.maximum(exponent, _LEAST_EXPONENT), _MOST_EXPONENT)


@gluon.jit
def _power_of_2(exponent):
    """As fp32 has it, of an exponent as fp32 has it."""
    return (exponent << 23).to(gl.float32, bitcast=True)


@gluon.jit
def convert(works, codes, scales, k_ring, v_ring, call):
    """Of every item that the loading warp takes, keys and values in turns. One loop for both: the
    code of two would not fit the instruction cache beside that of the consumers."""
    LAYOUT: gl.constexpr = _code_layout(codes.tiles.shape[1], codes.tiles.shape[2])
    used = 0
    turn = 0
    work = receive_work(works, turn)
    while work.seq >= 0:
        begin, end = key_tiles(call, work)
        for _ in range(2 * (end - begin)):
            tile = used // 2
            of_keys = used % 2 == 0
            codes.wait_full(used)
            x = codes.tile(used).load(LAYOUT)
            scale = scales.tile(used).load(gl.SliceLayout(1, LAYOUT))
            if of_keys:
                k_ring.wait_empty(tile)
            else:
                v_ring.wait_empty(tile)
            target = k_ring.tiles.index(used % k_ring.tiles.shape[0])
            target.store(_scaled(x, scale[:, None]))
            # What TMA brings next would overtake reads that still wait.
            fence_async_shared()
            if of_keys:
                k_ring.fill(tile)
            else:
                v_ring.fill(tile)
            codes.release(used)
            used += 1
        turn += 1
        work = receive_work(works, turn)


@gluon.constexpr_function
def _code_layout(rows, columns):
    """Of codes over four warps. Eight threads have eight neighbours each in one half of a row and
    in the other, and eight more the same four rows below: neither the codes nor what becomes of
    them are in the same banks for those threads that go together."""
    assert (rows, columns) == (128, 128)
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 64], [1, 0], [2, 0], [16, 0]],
        lane_bases=[[0, 8], [0, 16], [0, 32], [4, 0], [8, 0]],
        warp_bases=[[32, 0], [64, 0]],
        block_bases=[],
        shape=[rows, columns],
    )


@gluon.jit
def _scaled(x, scale):
    """Codes as fp16 times fp16: a byte amid the bits of 1024, less 1024 and what makes it one
    without a sign."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 t, a, b, c;
        xor.b32 t, $2, 0x80808080;
        mov.b32 c, 0x64646464;
        prmt.b32 a, t, c, 0x4140;
        prmt.b32 b, t, c, 0x4342;
        mov.b32 c, 0x64806480;
        sub.rn.f16x2 a, a, c;
        sub.rn.f16x2 b, b, c;
        mul.rn.f16x2 $0, a, $3;
        mul.rn.f16x2 $1, b, $4;
        }""",
        "=r,=r,r,r,r",
        [x, scale],
        dtype=gl.float16,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def queries_in_fp16(tile):
    """(the tile, each row in units of a power of two, which are these). In place."""
    D: gl.constexpr = tile.shape[1]
    ACROSS: gl.constexpr = D // 8
    layout: gl.constexpr = gl.BlockedLayout(
        [BLOCK_ROWS * ACROSS // 128, 8], [32 // ACROSS, ACROSS], [4, 1], [1, 0]
    )
    x = tile.load(layout).to(gl.float32)
    bits = gl.max(gl.abs(x), 1).to(gl.int32, bitcast=True)
    exponent = gl.maximum(bits >> 23, _QUERY_EXPONENT + 1)
    x *= _power_of_2(2 * 127 + _QUERY_EXPONENT - exponent)[:, None]
    halves = tile._reinterpret(gl.float16, tile.shape, tile.layout)
    halves.store(x.to(gl.float16))
    fence_async_shared()
    return halves, _power_of_2(exponent - _QUERY_EXPONENT)
