"""Shared memory of the grouped product for Hopper: stages of operands, and tiles of results.

A stage has the columns [k, k + BLOCK_K) of the tile's weight rows and of its rows of x. They share
the two barriers of the stage's slot in the ring (see attention/_hopper_memory.py).
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from echokernels._gluon_compat import aggregate
from echokernels.attention._hopper_memory import BLOCK_ROWS, Ring, make_ring

BLOCK_K = gl.constexpr(64)
"""Columns of a stage: 128 bytes, what TMA swizzles."""

COPYING_THREADS = gl.constexpr(64)
"""That gather rows of x, each of which arrives at the barrier of a stage."""


class Shape(NamedTuple):
    """What the kernel knows at compile time, as one constexpr."""

    activation: str
    consumers: int  # warpgroups, of BLOCK_ROWS rows each
    block_w: int  # weight rows of a tile: half of them gates with an activation
    slots: int  # stages on their way
    block_e: int  # a power of two, at least the number of experts
    gathers: bool  # rows of x
    early_weights: bool  # loaded before the kernel before this one is done
    has_row_weights: bool
    even_k: bool  # BLOCK_K divides K
    # Rows of `out` are multiples of 16 bytes: TMA stores no less, and goes beyond the last column.
    even_width: bool

    @property
    def gated(self) -> bool:
        return self.activation != "none"


@aggregate
class Call:
    """Scalars and pointers of the call. A pointer that is absent is not used: any other takes its
    place."""

    offsets_ptr: gl.tensor  # int[num_experts + 1]
    choices_ptr: gl.tensor  # i32[rows]
    row_weights_ptr: gl.tensor  # f32[rows]
    out_ptr: gl.tensor
    out_stride: gl.tensor
    num_experts: gl.tensor
    width: gl.tensor
    K: gl.tensor
    k: gl.tensor  # choices of a token
    group: gl.tensor  # row tiles of an expert that share its weights
    S: gl.constexpr  # a Shape

    @gluon.jit
    def steps(self):
        """Stages of a tile."""
        return gl.cdiv(self.K, BLOCK_K)


@aggregate
class Stages:
    weights: Ring  # tiles [block_w, BLOCK_K]
    rows: gl.shared_memory_descriptor  # [slots * consumers, BLOCK_ROWS, BLOCK_K]
    S: gl.constexpr

    @gluon.jit
    def rows_of(self, use, consumer):
        S: gl.constexpr = self.S
        return self.rows.index(use % S.slots * S.consumers + consumer)

    @gluon.jit
    def full(self, use):
        S: gl.constexpr = self.S
        return self.weights.full.index(use % S.slots)


@gluon.jit
def make_stages(dtype: gl.constexpr, S: gl.constexpr):
    PRODUCERS: gl.constexpr = 1 + COPYING_THREADS if S.gathers else 1
    weights = make_ring(dtype, S.slots, S.block_w, BLOCK_K, S.consumers, PRODUCERS)
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_ROWS, BLOCK_K], dtype)
    rows = gl.allocate_shared_memory(dtype, [S.slots * S.consumers, BLOCK_ROWS, BLOCK_K], LAYOUT)
    return Stages(weights, rows, S)


@gluon.jit
def make_out_tiles(dtype: gl.constexpr, S: gl.constexpr):
    """Of each consumer one, which holds half of what is accumulated, or all that is left of it with
    an activation."""
    HALF: gl.constexpr = S.block_w // 2
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_ROWS, HALF], dtype)
    return gl.allocate_shared_memory(dtype, [S.consumers, BLOCK_ROWS, HALF], LAYOUT)
