"""Gated activations (Shazeer, "GLU Variants Improve Transformer", 2020).

    out = act(gate) * up        x = [gate | up]

    silu_and_mul       act(g) = g / (1 + exp(-g))                               SwiGLU
    gelu_and_mul       act(g) = g/2 (1 + erf(g / sqrt(2)))                      GeGLU
    gelu_tanh_and_mul  act(g) = g/2 (1 + tanh(sqrt(2/pi) (g + 0.044715 g^3)))   GeGLU, approximated

x: [tokens, 2 * width], out: [tokens, width]. Everything is in fp32 and rounded once, into `out`,
which is mutated.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from echokernels._checks import (
    FLOATS,
    check_dim,
    check_dtype,
    check_last_contiguous,
    check_same_device,
    check_shape,
)
from echokernels._launch import launch
from echokernels._library import define_op
from echokernels._pdl import early_launch, let_next_start, wait_for_previous
from echokernels._tuning import TileConfig, select
from echokernels.activation import reference


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """The activation "silu", "gelu" or "gelu_tanh" of fp32 `x`: finite for every finite `x`."""
    # Both exponential forms are x / (1 + exp(-z)): where exp overflows, x / inf is the limit, 0.
    if ACTIVATION == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(z)) / 2 = 1 / (1 + exp(-2z)); 2 sqrt(2/pi) = 1.5957691216057308.
        # Factored so that no term is inf - inf.
        y = x / (1.0 + tl.exp(-1.5957691216057308 * x * (1.0 + 0.044715 * x * x)))
    else:
        tl.static_assert(ACTIVATION == "gelu")
        tail = _normal_tail(tl.abs(x))
        y = x * tl.where(x > 0, 1.0 - tail, tail)
    return y


@triton.jit
def _normal_tail(a):
    """erfc(a / sqrt(2)) / 2, the probability above a >= 0 of a standard normal, to 1e-5 of its own
    value, which 1 - erf would lose. erf also takes so many instructions that they, not the memory,
    would bound the op."""
    # t 2^(p(t) - a^2 log2(e) / 2), p the nearest to the exact exponent, to 1.2e-7, for a < 14.5;
    # beyond, the tail underflows.
    t = 1.0 / (1.0 + 0.4 * a)
    p = 0.27394453569671695 * t - 1.4028617378419657
    p = p * t + 2.8012488311468013
    p = p * t - 2.515251053538256
    p = p * t + 0.7742655172543074
    p = p * t - 0.2584757859127923
    p = p * t + 0.5360423823378999
    p = p * t + 1.4386102121387485
    p = p * t - 2.647522777714252
    return t * tl.exp2(p - 0.7213475204444817 * a * a)


@triton.jit(do_not_specialize=["num_rows"])
def _gated_kernel(
    out_ptr,  # [num_rows, width]
    x_ptr,  # [num_rows, 2 * width]
    num_rows,
    width,
    out_stride_row,
    x_stride_row,
    ACTIVATION: tl.constexpr,
    COLUMN_TILES: tl.constexpr,  # of a row: constant, so that no division is slow
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    pid = tl.program_id(0)
    row = ((pid // COLUMN_TILES).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    column = ((pid % COLUMN_TILES) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    mask = (row < num_rows) & (column < width)
    gate_ptr = x_ptr + row * x_stride_row + column
    wait_for_previous(PDL)
    # Before the loads: without a reduction behind them the program is over soon.
    let_next_start(PDL)
    gate = tl.load(gate_ptr, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + width, mask=mask, other=0.0).to(tl.float32)
    y = activate(gate, ACTIVATION) * up
    tl.store(out_ptr + row * out_stride_row + column, y.to(out_ptr.dtype.element_ty), mask=mask)


def _config(width: int) -> TileConfig:
    # 1,024 elements over 4 warps: a thread loads 16 bytes of gate and 16 of up when they are bf16,
    # enough in flight to saturate memory, and a few tokens still make many programs.
    block_n = min(triton.next_power_of_2(width), 1024)
    return TileConfig(block_m=1024 // block_n, block_n=block_n, num_warps=4)


def check_gate_and_up(x: torch.Tensor) -> None:
    check_dim("x", x, 2)
    check_dtype("x", x, FLOATS)
    check_last_contiguous("x", x)
    if x.shape[1] == 0 or x.shape[1] % 2:
        raise ValueError(
            f"x.shape is {tuple(x.shape)}, must have an even last dimension, at least 2"
        )


def _check(out: torch.Tensor, x: torch.Tensor) -> None:
    check_gate_and_up(x)
    check_shape("out", out, x.shape[0], x.shape[1] // 2)
    check_dtype("out", out, (x.dtype,))
    check_last_contiguous("out", out)
    check_same_device("x", x, out=out)


def _launch(out: torch.Tensor, x: torch.Tensor, activation: str) -> None:
    num_rows, width = out.shape
    config = select("gated", width, lambda: _config(width))
    column_tiles = triton.cdiv(width, config.block_n)
    launch(
        _gated_kernel,
        (triton.cdiv(num_rows, config.block_m) * column_tiles,),
        out,
        x,
        num_rows,
        width,
        out.stride(0),
        x.stride(0),
        ACTIVATION=activation,
        COLUMN_TILES=column_tiles,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        num_warps=config.num_warps,
        **early_launch(x.device),
    )


def _launch_silu(out: torch.Tensor, x: torch.Tensor) -> None:
    _launch(out, x, "silu")


def _launch_gelu(out: torch.Tensor, x: torch.Tensor) -> None:
    _launch(out, x, "gelu")


def _launch_gelu_tanh(out: torch.Tensor, x: torch.Tensor) -> None:
    _launch(out, x, "gelu_tanh")


_silu_and_mul = define_op(
    "silu_and_mul(Tensor(a!) out, Tensor x) -> ()",
    check=_check,
    triton=_launch_silu,
    reference=reference.silu_and_mul,
)
_gelu_and_mul = define_op(
    "gelu_and_mul(Tensor(a!) out, Tensor x) -> ()",
    check=_check,
    triton=_launch_gelu,
    reference=reference.gelu_and_mul,
)
_gelu_tanh_and_mul = define_op(
    "gelu_tanh_and_mul(Tensor(a!) out, Tensor x) -> ()",
    check=_check,
    triton=_launch_gelu_tanh,
    reference=reference.gelu_tanh_and_mul,
)


def silu_and_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """SwiGLU: silu(x[:, :d]) * x[:, d:].

    x: [tokens, 2 * d], fp16, bf16 or fp32, any row stride, last dimension contiguous.
    Returns `out`, [tokens, d] of the same dtype, last dimension contiguous, allocated unless given.
    Raises ValueError or TypeError for shapes, strides, devices or dtypes that do not fit.
    """
    return _gated(_silu_and_mul, x, out)


def gelu_and_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """GeGLU: gelu(x[:, :d]) * x[:, d:] with the exact GELU (erf). Arguments as `silu_and_mul`'s."""
    return _gated(_gelu_and_mul, x, out)


def gelu_tanh_and_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """GeGLU with the tanh approximation of GELU. Arguments as `silu_and_mul`'s."""
    return _gated(_gelu_tanh_and_mul, x, out)


def _gated(op: Callable[..., None], x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    if out is None:
        check_dim("x", x, 2)
        out = x.new_empty(x.shape[0], x.shape[1] // 2)
    op(out, x)
    return out
