"""A layer of experts for a few choices, taken as they come: two launches.

    gate_up   each program: some columns of act(gate) * up of one choice
    down      each program: some columns of one token's output, over all its experts

A weight is read for every choice of it, so this is for choices that are mostly of different
experts. All the work is to read, so programs multiply and add on the ordinary cores, in fp32, and
there are as many as run at once. `down` sums what a token's experts make in registers: their
products are not rounded.
"""

import torch
import triton
import triton.language as tl

from echokernels._launch import launch
from echokernels._pdl import early_launch, let_next_start, wait_for_previous
from echokernels._target import target_of
from echokernels._tuning import TileConfig, select
from echokernels.activation.gated import activate

_ROW_BYTES = 512, 2048  # of a tile, at least and at most
_TILE_BYTES = 16 * 1024


@triton.jit
def _dot_rows(
    rows,  # pointers [A, N, 1]
    row_mask,  # [A or 1, N, 1]
    x_rows,  # pointers [A or 1, 1, 1]
    x_mask,  # [A or 1, 1, 1]
    factor,  # [A, 1, 1], or a number
    K,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """f32[A, N]: dot products of rows with those of x, times `factor`; 0 where a mask is off."""
    acc = tl.zeros([rows.shape[0], rows.shape[1], BLOCK_K], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
        k = start + tl.arange(0, BLOCK_K)[None, None, :]
        w = tl.load(rows + k, mask=row_mask & (k < K), other=0.0)
        x = tl.load(x_rows + k, mask=x_mask & (k < K), other=0.0)
        acc += w.to(tl.float32) * x.to(tl.float32)
    # Behind the sum it would be multiplied and added at once, by each thread other numbers.
    return tl.sum(acc * factor, 2)


@triton.jit(do_not_specialize=["k", "expert_start"])
def _direct_gate_up_kernel(
    between_ptr,  # [tokens * k, width]
    x_ptr,  # [tokens, hidden]
    w1_ptr,  # [num_experts, 2 * width, hidden]
    ids_ptr,  # int [tokens, k]
    k,
    expert_start,
    num_experts,
    width,
    hidden,
    x_stride,
    w1_stride_expert,
    w1_stride,
    ids_stride,
    ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr,  # outputs: each has a gate and an up
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    # All of these programs run at once, and the next kernel has something to do before they end.
    let_next_start(PDL)
    choice = tl.program_id(1).to(tl.int64)
    token = choice // k
    expert = tl.load(ids_ptr + token * ids_stride + choice % k).to(tl.int64) - expert_start
    if (expert >= 0) & (expert < num_experts):
        column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        # Gates, then ups.
        row = tl.arange(0, 2)[:, None] * width + column[None, :]
        rows = w1_ptr + expert * w1_stride_expert + (row.to(tl.int64) * w1_stride)[:, :, None]
        x_row = x_ptr + token * x_stride + tl.zeros([1, 1, 1], tl.int32)
        everywhere = tl.full([1, 1, 1], True, tl.int1)
        exists = (column < width)[None, :, None]
        acc = _dot_rows(rows, exists, x_row, everywhere, 1.0, hidden, BLOCK_K, NUM_STAGES)
        gate, up = tl.split(tl.permute(acc, (1, 0)))
        y = activate(gate, ACTIVATION) * up
        at = between_ptr + choice * width + column
        tl.store(at, y.to(between_ptr.dtype.element_ty), mask=column < width)


@triton.jit(do_not_specialize=["k", "expert_start"])
def _direct_down_kernel(
    out_ptr,  # [tokens, hidden]
    between_ptr,  # [tokens * k, width]
    w2_ptr,  # [num_experts, hidden, width]
    weights_ptr,  # f32 [tokens, k]
    ids_ptr,  # int [tokens, k]
    k,
    expert_start,
    num_experts,
    hidden,
    width,
    out_stride,
    w2_stride_expert,
    w2_stride,
    weights_stride,
    ids_stride,
    BLOCK_J: tl.constexpr,  # k
    BLOCK_N: tl.constexpr,  # outputs
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    # Before it waits for the kernel before it, this one reads what that does not write: ids, which
    # all its programs have waited for. Not through the L1, which may hold what was there before.
    token = tl.program_id(1).to(tl.int64)
    j = tl.arange(0, BLOCK_J)
    ids = ids_ptr + token * ids_stride + j
    expert = tl.load(ids, mask=j < k, other=-1, cache_modifier=".cg").to(tl.int64) - expert_start
    is_local = (j < k) & (expert >= 0) & (expert < num_experts)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = (expert * w2_stride_expert)[:, None] + (column.to(tl.int64) * w2_stride)[None, :]
    rows = w2_ptr + rows[:, :, None]
    exists = is_local[:, None, None] & (column < hidden)[None, :, None]
    wait_for_previous(PDL)
    let_next_start(PDL)
    between_rows = between_ptr + ((token * k + j) * width)[:, None, None]
    weight = tl.load(weights_ptr + token * weights_stride + j, mask=is_local, other=0.0)
    acc = _dot_rows(
        rows, exists, between_rows, is_local[:, None, None], weight[:, None, None], width, BLOCK_K,
        NUM_STAGES,
    )  # fmt: skip
    y = tl.sum(acc, 0)
    at = out_ptr + token * out_stride + column
    tl.store(at, y.to(out_ptr.dtype.element_ty), mask=column < hidden)


def _config(parts: int, depth: int, itemsize: int) -> TileConfig:
    """block_m outputs, each the sum of `parts` rows, by block_n columns of the weight at a time."""
    least, most = (size // itemsize for size in _ROW_BYTES)
    columns = most
    while columns > least and depth % columns:
        columns //= 2
    columns = min(columns, max(triton.next_power_of_2(depth), 16))
    outputs = max(_TILE_BYTES // (parts * columns * itemsize), 1)
    return TileConfig(min(outputs, 16), columns, num_warps=4, num_stages=3)


def launch_direct(
    out: torch.Tensor,
    between: torch.Tensor,
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    activation: str,
    expert_start: int,
) -> None:
    """between: [tokens * k, width], memory. Of choices whose experts are not here it is not
    written."""
    _launch_gate_up(between, x, w1, ids, activation, expert_start)
    _launch_down(out, between, w2, weights, ids, expert_start)


def _launch_gate_up(
    between: torch.Tensor,
    x: torch.Tensor,
    w1: torch.Tensor,
    ids: torch.Tensor,
    activation: str,
    expert_start: int,
) -> None:
    (num_choices, width), hidden = between.shape, x.shape[1]
    key = (hidden, x.element_size(), target_of(x.device).name)
    config = select("moe_gate_up", key, lambda: _config(2, hidden, x.element_size()))
    launch(
        _direct_gate_up_kernel,
        (triton.cdiv(width, config.block_m), num_choices),
        between,
        x,
        w1,
        ids,
        ids.shape[1],
        expert_start,
        w1.shape[0],
        width,
        hidden,
        x.stride(0),
        w1.stride(0),
        w1.stride(1),
        ids.stride(0),
        ACTIVATION=activation,
        BLOCK_N=config.block_m,
        BLOCK_K=config.block_n,
        NUM_STAGES=config.num_stages,
        num_warps=config.num_warps,
        **early_launch(x.device),
    )


def _launch_down(
    out: torch.Tensor,
    between: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    expert_start: int,
) -> None:
    (num_tokens, hidden), width, k = out.shape, between.shape[1], ids.shape[1]
    block_j = triton.next_power_of_2(k)
    key = (block_j, width, out.element_size(), target_of(out.device).name)
    config = select("moe_down", key, lambda: _config(block_j, width, out.element_size()))
    launch(
        _direct_down_kernel,
        (triton.cdiv(hidden, config.block_m), num_tokens),
        out,
        between,
        w2,
        weights,
        ids,
        k,
        expert_start,
        w2.shape[0],
        hidden,
        width,
        out.stride(0),
        w2.stride(0),
        w2.stride(1),
        weights.stride(0),
        ids.stride(0),
        BLOCK_J=block_j,
        BLOCK_N=config.block_m,
        BLOCK_K=config.block_n,
        NUM_STAGES=config.num_stages,
        num_warps=config.num_warps,
        **early_launch(out.device),
    )
