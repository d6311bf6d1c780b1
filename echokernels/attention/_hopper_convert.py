"""The Hopper prefill from INT8 pages: codes become keys and values on their way to the consumers.

A warp loads codes and their scales as it would load keys and values, and four others convert them:
times their scales, rounded to the dtype of the queries, they go to the rings that the consumers
read, who know nothing of it. So an element is converted once for all queries of a tile, beside the
products and not between them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from echokernels.attention._hopper_work import key_tiles, receive_work

# Of a tile, converted at a time: more would not fit the registers.
_ROWS = gl.constexpr(16)
# What `_to_biased` adds.
_BIAS = gl.constexpr(32768.0 + 128.0)


@gluon.jit
def convert(works, k_codes, v_codes, scales, k_ring, v_ring, call):
    """Of every item that the loading warp takes."""
    used = 0
    turn = 0
    work = receive_work(works, turn)
    while work.seq >= 0:
        begin, end = key_tiles(call, work)
        for _ in range(end - begin):
            _convert(k_codes, scales.k_tiles, k_ring, used)
            _convert(v_codes, scales.v_tiles, v_ring, used)
            used += 1
        turn += 1
        work = receive_work(works, turn)


@gluon.jit
def _convert(codes, scales, ring, use):
    N: gl.constexpr = ring.tiles.shape[1]
    ACROSS: gl.constexpr = ring.tiles.shape[2] // 16
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    codes.wait_full(use)
    ring.wait_empty(use)
    source = codes.tile(use)
    scales = scales.index(use % scales.shape[0])
    target = ring.tile(use)
    for part in gl.static_range(N // _ROWS):
        x = _to_biased(source.slice(part * _ROWS, _ROWS).load(layout))
        scale = scales.slice(part * _ROWS, _ROWS).load(gl.SliceLayout(1, layout))[:, None]
        x = x * scale - _BIAS * scale
        target.slice(part * _ROWS, _ROWS).store(x.to(target.dtype))
    fence_async_shared()
    codes.release(use)
    mbarrier.arrive(ring.full.index(use % ring.tiles.shape[0]))


@gluon.jit
def _to_biased(x):
    """x + _BIAS in fp32 of int8, four to a register: a byte amid the bits of 2^15."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 t, u;
        xor.b32 t, $4, 0x80808080;
        mov.b32 u, 0x00000047;
        prmt.b32 $0, t, u, 0x4505;
        prmt.b32 $1, t, u, 0x4515;
        prmt.b32 $2, t, u, 0x4525;
        prmt.b32 $3, t, u, 0x4535;
        }""",
        "=r,=r,=r,=r,r",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=4,
    )
