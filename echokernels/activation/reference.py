"""Plain PyTorch forms of the gated activations: their definition and the CPU implementation.

Arithmetic is in float32, or float64 when the input is float64.
"""

import math

import torch
from torch.nn import functional

from echokernels._reference import accumulable, linear
from echokernels.quant.reference import quantise_rows


def silu_and_mul(out: torch.Tensor, x: torch.Tensor) -> None:
    gate, up = _gate_and_up(x)
    out.copy_(functional.silu(gate).mul_(up))


def silu_and_mul_quant(out: torch.Tensor, scale: torch.Tensor, x: torch.Tensor) -> None:
    gate, up = _gate_and_up(x)
    quantise_rows(out, scale, functional.silu(gate).mul_(up))


def gelu_and_mul(out: torch.Tensor, x: torch.Tensor) -> None:
    gate, up = _gate_and_up(x)
    # functional.gelu multiplies before it halves, so it overflows for gates above half the range.
    half = gate * 0.5
    # erfc, for 1 + erf cancels where the gate is negative.
    out.copy_(torch.erfc(gate * -math.sqrt(0.5)).mul_(half).mul_(up))


def gelu_tanh_and_mul(out: torch.Tensor, x: torch.Tensor) -> None:
    gate, up = _gate_and_up(x)
    out.copy_(functional.gelu(gate, approximate="tanh").mul_(up))


# By the name of the activation of the gate.
ACTIVATIONS = {"silu": silu_and_mul, "gelu": gelu_and_mul, "gelu_tanh": gelu_tanh_and_mul}


def fused_gate_up(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
) -> None:
    ACTIVATIONS[activation](out, linear(x, weight, bias))


def _gate_and_up(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = x.chunk(2, dim=-1)
    return accumulable(gate), up
