"""Plain PyTorch forms of the normalisation ops: their definition, the tests' oracle and the CPU
implementation.

Arithmetic is in float32, or float64 when the input is float64.
"""

import torch

from echokernels._reference import accumulable
from echokernels.quant.reference import quantise_rows


def rms_norm(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float = 0.0,
) -> None:
    out.copy_(_normalise(accumulable(x), weight, eps, weight_offset))


def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float = 0.0,
) -> None:
    total = accumulable(x) + accumulable(residual)
    residual.copy_(total)
    x.copy_(_normalise(total, weight, eps, weight_offset))


def rms_norm_quant(
    out: torch.Tensor,
    scale: torch.Tensor,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float = 0.0,
) -> None:
    total = accumulable(x)
    if residual is not None:
        total = total + accumulable(residual)
        residual.copy_(total)
    quantise_rows(out, scale, _normalise(total, weight, eps, weight_offset))


def _normalise(
    x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float
) -> torch.Tensor:
    scale = weight.to(x.dtype)
    if weight_offset:
        scale = scale + weight_offset
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), scale, eps)
