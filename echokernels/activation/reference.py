"""Plain PyTorch forms of the gated activations: their definition and the CPU implementation.

Arithmetic is in float32, or float64 when the input is float64.
"""

import math

import torch
from torch.nn import functional

from echokernels._reference import accumulable


def silu_and_mul(out: torch.Tensor, x: torch.Tensor) -> None:
    gate, up = _gate_and_up(x)
    out.copy_(functional.silu(gate).mul_(up))


def gelu_and_mul(out: torch.Tensor, x: torch.Tensor) -> None:
    gate, up = _gate_and_up(x)
    # functional.gelu multiplies before it halves, so it overflows for gates above half the range.
    half = gate * 0.5
    out.copy_(torch.erf(gate * math.sqrt(0.5)).add_(1.0).mul_(half).mul_(up))


def gelu_tanh_and_mul(out: torch.Tensor, x: torch.Tensor) -> None:
    gate, up = _gate_and_up(x)
    out.copy_(functional.gelu(gate, approximate="tanh").mul_(up))


def _gate_and_up(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = x.chunk(2, dim=-1)
    return accumulable(gate), up
