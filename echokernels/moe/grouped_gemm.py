"""Products of many experts in one launch: rows sorted by expert, each group with its own weight.

    out[r] = f(x[r] W_e^T) * row_weights[r]        expert_offsets[e] <= r < expert_offsets[e + 1]

f is the identity ("none"), or act(gate) * up of W = [Wg; Wu] as in gate_up.py ("silu", "gelu",
"gelu_tanh"). x: [rows, K], weight: [experts, width, K], twice the width with an activation;
expert_offsets: [experts + 1], ascending; row_weights: fp32 [rows] or None. Products are summed in
fp32 and only the result is rounded, into `out`, [rows, width], which is mutated; rows outside all
groups are not written.

Programs stay and take one tile after another, counted over all experts from expert_offsets on the
device: nothing waits for the host, and an expert without rows costs nothing. Tiles of an expert's
rows that share weights come one after another. Sizes of tiles, and how many programs there are,
follow from shapes alone, never from offsets: one CUDA graph serves any load. On Hopper a kernel of
its own runs where experts have a few rows each (_hopper_gemm.py).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from echokernels._checks import (
    FLOATS,
    INDEX,
    check_dim,
    check_dtype,
    check_last_contiguous,
    check_one_of,
    check_range,
    check_same_device,
    check_shape,
)
from echokernels._gemm import RESERVED, project, split_pairs, token_block, weight_rows, weight_tile
from echokernels._launch import launch
from echokernels._library import define_op
from echokernels._path import current_path
from echokernels._pdl import early_launch, let_next_start, wait_for_previous
from echokernels._target import INTERPRETED, Target, target_of
from echokernels._tuning import TileConfig, select
from echokernels.activation.gated import activate
from echokernels.moe import _hopper_gemm, reference
from echokernels.moe._tiles import most_row_tiles, place_of
from echokernels.moe.routing import MAX_EXPERTS


@dataclass(frozen=True)
class GroupedTile(TileConfig):
    """block_m weight rows by block_t rows of x, block_n columns of both at a time."""

    block_t: int = 16
    programs_per_sm: int = 2  # at most
    group: int = 2**20  # row tiles of an expert that come one after another for the same weights


@triton.jit(do_not_specialize=["k", "group"])
def _grouped_gemm_kernel(
    out_ptr,  # [rows, width]
    x_ptr,  # [rows, K]
    weight_ptr,  # [num_experts, width, K]; [num_experts, 2 * width, K] with an activation
    offsets_ptr,  # int [num_experts + 1]
    row_weights_ptr,  # f32 [rows], or None
    choices_ptr,  # i32 [rows]: a row's choice, which is of row choice // k of x; or None
    num_experts,
    width,
    K,
    k,
    group,  # row tiles of an expert that share its weights
    out_stride,
    x_stride,
    weight_stride_expert,
    weight_stride,
    ACTIVATION: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_E: tl.constexpr,  # num_experts
    BLOCK_M: tl.constexpr,  # rows of a weight: half of them gates with an activation
    BLOCK_T: tl.constexpr,  # rows of x
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    GATED: tl.constexpr = ACTIVATION != "none"
    BLOCK_N: tl.constexpr = BLOCK_M // 2 if GATED else BLOCK_M
    expert = tl.arange(0, BLOCK_E)
    exists = expert < num_experts
    wait_for_previous(PDL)
    begin = tl.load(offsets_ptr + expert, mask=exists, other=0).to(tl.int32)
    end = tl.load(offsets_ptr + expert + 1, mask=exists, other=0).to(tl.int32)
    row_tiles = tl.cdiv(end - begin, BLOCK_T)
    # Tiles of all experts up to each.
    column_tiles = tl.cdiv(width, BLOCK_N)
    tiles = tl.cumsum(row_tiles, 0) * column_tiles
    let_next_start(PDL)
    for tile in range(tl.program_id(0), tl.max(tiles, 0), tl.num_programs(0)):
        owner = tl.sum((tiles <= tile).to(tl.int32), 0)
        own = expert == owner
        own_tiles = tl.sum(tl.where(own, row_tiles, 0), 0)
        place = tile - tl.max(tl.where(expert < owner, tiles, 0), 0)
        row_tile, column_tile = place_of(place, own_tiles, column_tiles, group)
        first = tl.sum(tl.where(own, begin, 0), 0) + row_tile * BLOCK_T
        token = first.to(tl.int64) + tl.arange(0, BLOCK_T)
        token_mask = token < tl.sum(tl.where(own, end, 0), 0)
        source = token
        if choices_ptr is not None:
            source = tl.load(choices_ptr + token, mask=token_mask, other=0).to(tl.int64) // k
        weight = weight_ptr + owner.to(tl.int64) * weight_stride_expert

        row = tl.arange(0, BLOCK_M)
        column = column_tile * BLOCK_N + (row // 2 if GATED else row)
        # With an activation row 2i of the tile is a gate, row 2i + 1 the up of the same output.
        weight_row = row % 2 * width + column if GATED else column
        acc = project(
            weight, weight_stride, weight_row.to(tl.int64), column < width, x_ptr, x_stride, source,
            token_mask, K, EVEN_K, BLOCK_K, UPCAST,
        )  # fmt: skip
        if GATED:
            gate, up = split_pairs(acc)
            acc = activate(gate, ACTIVATION) * up
        if row_weights_ptr is not None:
            acc *= tl.load(row_weights_ptr + token, mask=token_mask, other=0.0)[None, :]
        column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        out_tile = out_ptr + (token * out_stride)[None, :] + column[:, None]
        mask = (column < width)[:, None] & token_mask[None, :]
        tl.store(out_tile, acc.to(out_ptr.dtype.element_ty), mask=mask)


def _config(
    num_rows: int, num_experts: int, weight_size: int, itemsize: int, target: Target
) -> GroupedTile:
    """For experts that share the rows evenly."""
    block_t = token_block(triton.cdiv(num_rows, num_experts), itemsize)
    if block_t <= 32 and itemsize < 4:
        return _few_rows_config(block_t, itemsize, target)
    block_m = weight_rows(weight_size, block_t, itemsize, target)
    per_sm = 4 if block_t <= 32 else 2
    column_tiles = triton.cdiv(weight_size, block_m)
    programs = _num_programs(num_rows, num_experts, column_tiles, block_t, per_sm, target)
    tile = weight_tile(block_m, block_t, programs, itemsize, target)
    return GroupedTile(tile.block_m, tile.block_n, tile.num_warps, tile.num_stages, block_t, per_sm)


def _few_rows_config(block_t: int, itemsize: int, target: Target) -> GroupedTile:
    """Two programs on an SM, each with 64 KiB of weights on their way: with three of 48 KiB layers
    of Qwen3 are up to 2% faster (H200), one of Mixtral at 8 tokens 4% slower."""
    column_bytes = (64 + block_t) * itemsize
    budget = target.shared_memory // 2 - RESERVED
    block_k = 128 if budget >= 3 * 128 * column_bytes else 64
    num_stages = min(budget // (block_k * column_bytes), 4)
    return GroupedTile(64, block_k, 4, num_stages, block_t, programs_per_sm=2)


def _num_programs(
    num_rows: int, num_experts: int, column_tiles: int, block_t: int, per_sm: int, target: Target
) -> int:
    """As many as there may be tiles, but no more than run at once."""
    row_tiles = most_row_tiles(num_rows, num_experts, block_t)
    return min(row_tiles * column_tiles, target.num_sms * per_sm)


def _check(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    expert_offsets: torch.Tensor,
    row_weights: torch.Tensor | None,
    activation: str,
) -> None:
    check_dim("x", x, 2)
    check_dtype("x", x, FLOATS)
    check_dim("weight", weight, 3)
    num_experts, weight_size, _ = weight.shape
    check_range("weight.shape[0]", num_experts, 1, MAX_EXPERTS)
    check_shape("weight", weight, None, None, x.shape[1])
    check_one_of("activation", activation, reference.ACTIVATIONS)
    gated = activation != "none"
    if weight_size == 0 or (gated and weight_size % 2):
        least = (
            "an even second dimension, at least 2" if gated else "a second dimension, at least 1"
        )
        raise ValueError(f"weight.shape is {tuple(weight.shape)}, must have {least}")
    check_shape("out", out, x.shape[0], weight_size // 2 if gated else weight_size)
    for name, tensor in (("weight", weight), ("out", out)):
        check_dtype(name, tensor, (x.dtype,))
    check_shape("expert_offsets", expert_offsets, num_experts + 1)
    check_dtype("expert_offsets", expert_offsets, INDEX)
    if row_weights is not None:
        check_shape("row_weights", row_weights, x.shape[0])
        check_dtype("row_weights", row_weights, (torch.float32,))
        check_last_contiguous("row_weights", row_weights)
    for name, tensor in (
        ("x", x), ("weight", weight), ("out", out), ("expert_offsets", expert_offsets),
    ):  # fmt: skip
        check_last_contiguous(name, tensor)
    check_same_device(
        "x", x, weight=weight, out=out, expert_offsets=expert_offsets, row_weights=row_weights
    )


def _debug_check(
    out: torch.Tensor,  # noqa: ARG001
    x: torch.Tensor,
    weight: torch.Tensor,  # noqa: ARG001
    expert_offsets: torch.Tensor,
    row_weights: torch.Tensor | None,  # noqa: ARG001
    activation: str,  # noqa: ARG001
) -> None:
    if (
        expert_offsets[0] < 0
        or expert_offsets[-1] > x.shape[0]
        or (expert_offsets.diff() < 0).any()
    ):
        raise ValueError(
            f"expert_offsets is {expert_offsets.tolist()}, must ascend from 0 to at most {len(x)}"
        )


def _runs_hopper(target: Target, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> bool:
    path = current_path()
    return (
        path != "portable"
        and _hopper_gemm.can_run(target, out, x, weight)
        and (path == "hopper" or _hopper_gemm.is_worth_it(out.shape[0], weight.shape[0]))
    )


def launch_grouped_gemm(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    expert_offsets: torch.Tensor,
    row_weights: torch.Tensor | None,
    activation: str,
    choices: torch.Tensor | None = None,
    k: int = 1,
    early_weights: bool = False,
) -> None:
    """choices: int32 [rows], of which token and expert (token * k + j) each row of `out` is; x then
    has a row for each token. Without them a row for each of `out`.

    early_weights: the kernel before this one has written x and nothing else that this one reads,
    and let it start only after waiting for what came before: what else is read may be read while
    that kernel finishes."""
    (num_rows, width), (num_experts, weight_size, depth) = out.shape, weight.shape
    if num_rows == 0:
        return
    target, itemsize = target_of(x.device), x.element_size()
    if _runs_hopper(target, out, x, weight):
        _hopper_gemm.launch_hopper(
            target, out, x, weight, expert_offsets, row_weights, activation, choices, k,
            early_weights,
        )  # fmt: skip
        return
    shapes = (num_rows, num_experts, weight_size, itemsize, target)
    config = select("grouped_gemm", (*shapes[:-1], target.name), lambda: _config(*shapes))
    assert isinstance(config, GroupedTile)
    column_tiles = triton.cdiv(weight_size, config.block_m)
    programs = _num_programs(
        num_rows, num_experts, column_tiles, config.block_t, config.programs_per_sm, target
    )
    launch(
        _grouped_gemm_kernel,
        (programs,),
        out,
        x,
        weight,
        expert_offsets,
        row_weights,
        choices,
        num_experts,
        width,
        depth,
        k,
        config.group,
        out.stride(0),
        x.stride(0),
        weight.stride(0),
        weight.stride(1),
        ACTIVATION=activation,
        EVEN_K=depth % config.block_n == 0,
        BLOCK_E=triton.next_power_of_2(num_experts),
        BLOCK_M=config.block_m,
        BLOCK_T=config.block_t,
        BLOCK_K=config.block_n,
        UPCAST=INTERPRETED,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **early_launch(x.device),
    )


_grouped_gemm = define_op(
    "grouped_gemm(Tensor(a!) out, Tensor x, Tensor weight, Tensor expert_offsets, "
    "Tensor? row_weights, str activation) -> ()",
    check=_check,
    debug_check=_debug_check,
    triton=launch_grouped_gemm,
    reference=reference.grouped_gemm,
)


def grouped_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    expert_offsets: torch.Tensor,
    *,
    row_weights: torch.Tensor | None = None,
    activation: str = "none",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """[rows, width]: each row of x times the weight of its expert.

    x: [rows, K], fp16, bf16 or fp32, rows sorted by expert as `moe_permute` returns them.
    weight: [experts, width, K], at most 512 experts; with an activation [experts, 2 * width, K],
        the gate projection's rows, then the up projection's. fp32 is multiplied exactly (no TF32).
    expert_offsets: int32 or int64 [experts + 1], where each expert's rows begin, and the end.
    row_weights: fp32 [rows], multiplies each row of the result, or None.
    activation: "none", or "silu", "gelu" (erf) or "gelu_tanh" of the gate.
    out: where the result goes; a new tensor by default. Rows outside all groups are not written.

    Raises:
        TypeError, ValueError: A dtype, shape, stride or device does not fit.
    """
    if out is None:
        check_dim("x", x, 2)
        check_dim("weight", weight, 3)
        out = x.new_empty(x.shape[0], weight.shape[1] // (1 if activation == "none" else 2))
    _grouped_gemm(out, x, weight, expert_offsets, row_weights, activation)
    return out
