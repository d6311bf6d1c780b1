"""Plain PyTorch forms of the quantisation of rows: their definition and the CPU implementation."""

import torch

from echokernels._reference import accumulable
from echokernels.quant._row import LIMITS, MIN_SCALE


def quantize_int8(q: torch.Tensor, scale: torch.Tensor, x: torch.Tensor) -> None:
    quantise_rows(q, scale, accumulable(x))


def dequantize_int8(out: torch.Tensor, q: torch.Tensor, scale: torch.Tensor) -> None:
    out.copy_(q * scale[..., None])


def quantise_rows(out: torch.Tensor, scale: torch.Tensor, y: torch.Tensor) -> None:
    """`out` and `scale` become the codes and the scales of the rows of `y`, float32 or float64."""
    limit = LIMITS[out.dtype]
    # A row of no columns is one of zeros.
    absmax = y.abs().amax(-1) if y.shape[-1] else y.new_zeros(y.shape[:-1])
    row_scale = (absmax / limit).clamp_min(MIN_SCALE)
    finite = absmax.isfinite()
    scale.copy_(row_scale.where(finite, torch.nan))
    codes = (y / row_scale[..., None]).where(finite[..., None], 0.0)
    # Casts from floating point to int8 truncate; those to float8 round, but need not saturate.
    out.copy_(codes.round() if out.dtype == torch.int8 else codes.clamp(-limit, limit))
