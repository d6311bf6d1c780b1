"""The grouped product of many rows for Hopper, in Gluon: by TMA and WGMMA.

A program stays on its SM and takes one tile after another, of all experts. One warp counts the
tiles and loads by TMA, two gather rows of x where they do not stand in order
(`_hopper_gemm_load`), and two warpgroups of 64 rows each multiply (`_hopper_gemm_consume`). They
read the same weights. One whose rows are all beyond the expert's end leaves the tensor cores to the
other: the arithmetic follows the number of rows in steps of 64.

While results are rounded and stored, the first stages of the next tile are on their way. Of a
program's first tile the weights are, while the kernel before finishes, if only x is of that kernel.
What it computes is what the portable kernel in grouped_gemm.py does.
"""

from dataclasses import dataclass

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from echokernels._launch import launch
from echokernels._pdl import early_launch, let_next_start, wait_for_previous
from echokernels._target import Target
from echokernels._tuning import TileConfig, select
from echokernels.attention._hopper_memory import BLOCK_ROWS, make_number_ring
from echokernels.attention._hopper_tma import (
    GLUON_DTYPES,
    box_descriptor,
    is_addressable,
    steps,
)
from echokernels.moe._hopper_gemm_consume import consume
from echokernels.moe._hopper_gemm_load import gather, load
from echokernels.moe._hopper_gemm_memory import (
    BLOCK_K,
    Call,
    Shape,
    make_out_tiles,
    make_stages,
)
from echokernels.moe._tiles import most_row_tiles

# Of each expert on average: 64 tokens of Qwen3-30B-A3B take 282 us instead of 393.
_LEAST_ROWS = 4
_CONSUMERS = 2
# Registers of a thread that multiplies, and of one that loads, multiples of 8: with the idle warps
# that make up a warpgroup of the loading ones they make what the launch took, 168 of 12 warps. More
# warps would have fewer than a WGMMA of 256 columns takes.
_REGISTERS = (224, 56)
_REGISTERS_GATHERING = (216, 72)


@gluon.jit
def _consume_0(out_desc, out_tiles, works, stages, call):
    consume(0, out_desc, out_tiles, works, stages, call)


@gluon.jit
def _consume_1(out_desc, out_tiles, works, stages, call):
    consume(1, out_desc, out_tiles, works, stages, call)


# Index tensors may be slices at any offset of larger buffers: their alignment varies at run time.
@gluon.jit(
    do_not_specialize=[
        "offsets_ptr", "row_weights_ptr", "choices_ptr", "num_experts", "k", "group",
        "x_stride",
    ]
)  # fmt: skip
def grouped_gemm_hopper_kernel(
    out_ptr,  # [rows, width]
    out_desc,  # of the same
    x,  # [rows, K]: a TMA descriptor; or [tokens, K]: a pointer, of which rows are gathered
    weight_desc,  # [num_experts, width, K]; [num_experts, 2 * width, K] with an activation
    offsets_ptr,  # int[num_experts + 1]
    row_weights_ptr,  # f32[rows], or None
    choices_ptr,  # i32[rows]: a row's choice, which is of row choice // k of x; or None
    num_experts,
    width,
    K,
    k,
    group,
    out_stride,
    x_stride,  # in units of 16 bytes
    S: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
):
    dtype: gl.constexpr = weight_desc.dtype
    stages = make_stages(dtype, S)
    out_tiles = make_out_tiles(dtype, S)
    works = make_number_ring(4, S.consumers + S.gathers)
    call = Call(
        offsets_ptr,
        choices_ptr if S.gathers else offsets_ptr,
        row_weights_ptr if S.has_row_weights else offsets_ptr,
        out_ptr, out_stride, num_experts, width, K, k, group, S,
    )  # fmt: skip
    if not S.early_weights:
        wait_for_previous(PDL)
        let_next_start(PDL)
    uses = (out_desc, out_tiles, works, stages, call)
    loads = (x, weight_desc, works, stages, call, PDL)
    if S.gathers:
        copies = (x, x_stride, works, stages, call)
        gl.warp_specialize(
            [(_consume_0, uses), (_consume_1, uses), (gather, copies), (load, loads)],
            [4, 2, 1],
            [CONSUMER_REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [(_consume_0, uses), (_consume_1, uses), (load, loads)],
            [4, 1],
            [CONSUMER_REGISTERS, LOADER_REGISTERS],
        )


@dataclass(frozen=True)
class HopperTile(TileConfig):
    """block_m rows of x by block_n rows of a weight; num_stages on their way."""

    group: int = 16  # row tiles of an expert that come one after another for the same weights


def _config(num_rows: int, num_experts: int, weight_size: int, target: Target) -> HopperTile:
    # What so many stages and a tile of results for each consumer leave of the shared memory is not
    # enough for more.
    block_m = _CONSUMERS * BLOCK_ROWS.value
    large = HopperTile(block_m, 256, num_stages=4)
    row_tiles = num_experts * triton.cdiv(triton.cdiv(num_rows, num_experts), block_m)
    if row_tiles * triton.cdiv(weight_size, large.block_n) > target.num_sms:
        return large
    # If experts share the rows evenly, large tiles take one turn. Mostly they do not, and two turns
    # of these are longer than three of half the size (512 tokens of Mixtral: 353 us, 292).
    return HopperTile(block_m, 128, num_stages=6)


def can_run(
    target: Target,
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
) -> bool:
    """Whether the kernel takes this call: what TMA cannot address is left to the portable one."""
    return (
        target.runs_hopper_kernels
        and x.dtype in GLUON_DTYPES
        and x.shape[1] >= 8
        and x.shape[1] % 8 == 0
        and out.shape[1] > 1  # what is 1 would be a constant to Triton
        and x.shape[0] * x.stride(0) * x.element_size() < 2**35  # the gathering counts 16 bytes
        and all(is_addressable(tensor) for tensor in (out, x, weight))
    )


def is_worth_it(num_rows: int, num_experts: int) -> bool:
    return num_rows >= _LEAST_ROWS * num_experts


def launch_hopper(
    target: Target,
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    expert_offsets: torch.Tensor,
    row_weights: torch.Tensor | None,
    activation: str,
    choices: torch.Tensor | None,
    k: int,
    early_weights: bool,
) -> None:
    (num_rows, width), (num_experts, weight_size, depth) = out.shape, weight.shape
    key = (num_rows, num_experts, weight_size, depth, activation, target.name)
    config = select(
        "grouped_gemm_hopper", key, lambda: _config(num_rows, num_experts, weight_size, target)
    )
    assert isinstance(config, HopperTile)
    gathers = choices is not None
    half = config.block_n // 2
    shape = Shape(
        activation=activation,
        consumers=config.block_m // BLOCK_ROWS.value,
        block_w=config.block_n,
        slots=config.num_stages,
        block_e=max(triton.next_power_of_2(num_experts), 32),
        gathers=gathers,
        early_weights=early_weights and not gathers,
        has_row_weights=row_weights is not None,
        even_k=depth % BLOCK_K.value == 0,
        even_width=width * out.element_size() % 16 == 0,
    )
    row_tiles = most_row_tiles(num_rows, num_experts, config.block_m)
    consumer_registers, loader_registers = _REGISTERS_GATHERING if gathers else _REGISTERS
    launch(
        grouped_gemm_hopper_kernel,
        (min(row_tiles * triton.cdiv(weight_size, config.block_n), target.num_sms),),
        out,
        box_descriptor(out, [BLOCK_ROWS.value, half]),
        x if gathers else box_descriptor(x, [BLOCK_ROWS.value, BLOCK_K.value]),
        box_descriptor(weight, [1, half, BLOCK_K.value]),
        expert_offsets,
        row_weights,
        choices,
        num_experts,
        width,
        depth,
        k,
        config.group,
        *steps(out),
        steps(x)[0] * x.element_size() // 16,
        S=shape,
        CONSUMER_REGISTERS=consumer_registers,
        LOADER_REGISTERS=loader_registers,
        num_warps=4,
        **early_launch(x.device),
    )
