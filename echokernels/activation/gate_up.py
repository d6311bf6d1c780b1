"""Gate and up projections of a gated MLP with the activation in their epilogue.

    out = act(x Wg^T + bg) * (x Wu^T + bu)        weight = [Wg; Wu]        bias = [bg; bu]

x: [tokens, K], weight: [2 * width, K] (the layout of nn.Linear), out: [tokens, width]; act as in
gated.py. Products are summed in fp32 and only the result is rounded, into `out`, which is mutated.

A tile holds gate and up rows of the same outputs, so it needs no other to finish. Tile widths
follow the number of tokens: the last bit of a result may depend on the batch.
"""

import torch
import triton
import triton.language as tl

from echokernels._checks import (
    check_dim,
    check_dtype,
    check_last_contiguous,
    check_one_of,
    check_same_device,
    check_shape,
)
from echokernels._gemm import (
    check_projection,
    project,
    split_pairs,
    split_tokens,
    tile_of,
    token_block,
    weight_rows,
    weight_tile,
)
from echokernels._launch import launch
from echokernels._library import define_op
from echokernels._pdl import early_launch, let_next_start, wait_for_previous
from echokernels._target import INTERPRETED, Target, target_of
from echokernels._tuning import TileConfig, select
from echokernels.activation import reference
from echokernels.activation.gated import activate


@triton.jit(do_not_specialize=["num_tokens", "token_tiles"])
def _gate_up_kernel(
    out_ptr,  # [num_tokens, width]
    x_ptr,  # [num_tokens, K]
    weight_ptr,  # [2 * width, K]
    bias_ptr,  # [2 * width], or None
    num_tokens,
    token_tiles,
    width,
    K,
    out_stride,
    x_stride,
    weight_stride,
    ACTIVATION: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,  # rows of the weight: half of them gates
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    BLOCK_N: tl.constexpr = BLOCK_M // 2
    tile, token_tile = tile_of(tl.program_id(0), tl.cdiv(width, BLOCK_N), token_tiles)
    token = token_tile.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    token_mask = token < num_tokens
    # Row 2i of the tile is a gate, row 2i + 1 the up of the same output.
    row = tl.arange(0, BLOCK_M)
    column = tile * BLOCK_N + row // 2
    acc = project(
        weight_ptr, weight_stride, (row % 2 * width + column).to(tl.int64), column < width,
        x_ptr, x_stride, token, token_mask, K, EVEN_K, BLOCK_K, UPCAST,
    )  # fmt: skip
    let_next_start(PDL)
    gate, up = split_pairs(acc)

    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    column_mask = column < width
    if bias_ptr is not None:
        gate += tl.load(bias_ptr + column, mask=column_mask, other=0.0).to(tl.float32)[:, None]
        up += tl.load(bias_ptr + width + column, mask=column_mask, other=0.0).to(tl.float32)[
            :, None
        ]
    y = activate(gate, ACTIVATION) * up
    out_tile = out_ptr + (token * out_stride)[None, :] + column[:, None]
    mask = column_mask[:, None] & token_mask[None, :]
    tl.store(out_tile, y.to(out_ptr.dtype.element_ty), mask=mask)


def _blocks(num_tokens: int, width: int, itemsize: int, target: Target) -> tuple[int, int]:
    """(BLOCK_M, BLOCK_T)"""
    block_t = token_block(num_tokens, itemsize)
    block_m = weight_rows(2 * width, block_t, itemsize, target)
    return block_m, split_tokens(block_t, num_tokens, triton.cdiv(2 * width, block_m), target)


def _config(block_m: int, block_t: int, width: int, itemsize: int, target: Target) -> TileConfig:
    return weight_tile(block_m, block_t, triton.cdiv(2 * width, block_m), itemsize, target)


def _check(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
) -> None:
    check_projection(x, weight, bias)
    if weight.shape[0] == 0 or weight.shape[0] % 2:
        raise ValueError(
            f"weight.shape is {tuple(weight.shape)}, must have an even first dimension, at least 2"
        )
    check_shape("out", out, x.shape[0], weight.shape[0] // 2)
    check_dtype("out", out, (x.dtype,))
    check_last_contiguous("out", out)
    check_one_of("activation", activation, reference.ACTIVATIONS)
    check_same_device("x", x, out=out)


def _launch(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
) -> None:
    (num_tokens, width), input_width = out.shape, x.shape[1]
    target = target_of(x.device)
    block_m, block_t = _blocks(num_tokens, width, x.element_size(), target)
    key = (block_m, block_t, width, input_width, x.element_size(), target.name)
    config = select(
        "fused_gate_up", key, lambda: _config(block_m, block_t, width, x.element_size(), target)
    )
    token_tiles = triton.cdiv(num_tokens, block_t)
    launch(
        _gate_up_kernel,
        (token_tiles * triton.cdiv(width, config.block_m // 2),),
        out,
        x,
        weight,
        bias,
        num_tokens,
        token_tiles,
        width,
        input_width,
        out.stride(0),
        x.stride(0),
        weight.stride(0),
        ACTIVATION=activation,
        EVEN_K=input_width % config.block_n == 0,
        BLOCK_M=config.block_m,
        BLOCK_T=block_t,
        BLOCK_K=config.block_n,
        UPCAST=INTERPRETED,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **early_launch(x.device),
    )


_fused_gate_up = define_op(
    "fused_gate_up(Tensor(a!) out, Tensor x, Tensor weight, Tensor? bias, str activation) -> ()",
    check=_check,
    triton=_launch,
    reference=reference.fused_gate_up,
)


def fused_gate_up(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str = "silu",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The first half of a gated MLP: act(x @ gate.T) * (x @ up.T) in one kernel.

    x: [tokens, K], fp16, bf16 or fp32. weight: [2 * width, K], the gate projection's rows, then the
    up projection's; bias: [2 * width] in the same order, or None. All of one dtype, last dimension
    contiguous, any row strides. fp32 is multiplied exactly (no TF32).
    activation: "silu", "gelu" (erf) or "gelu_tanh", of the gate.

    Meant for up to 64 tokens: it reads the weights once, at the speed of memory. More are right but
    slower than a library's GEMM and `silu_and_mul`.

    Returns `out`, [tokens, width] of the same dtype, allocated unless given.
    Raises ValueError or TypeError for shapes, strides, devices or dtypes that do not fit.
    """
    if out is None:
        check_dim("x", x, 2)
        check_dim("weight", weight, 2)
        out = x.new_empty(x.shape[0], weight.shape[0] // 2)
    _fused_gate_up(out, x, weight, bias, activation)
    return out
