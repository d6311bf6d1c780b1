"""Plain PyTorch form of the quantisation of rows: its definition and the CPU implementation."""

import torch

from echokernels.quant._row import LIMITS, MIN_SCALE


def quantise_rows(out: torch.Tensor, scale: torch.Tensor, y: torch.Tensor) -> None:
    """`out` and `scale` become the codes and the scales of the rows of `y`, float32 or float64."""
    limit = LIMITS[out.dtype]
    absmax = y.abs().amax(-1)
    row_scale = (absmax / limit).clamp_min(MIN_SCALE)
    finite = absmax.isfinite()
    scale.copy_(row_scale.where(finite, torch.nan))
    codes = (y / row_scale[..., None]).where(finite[..., None], 0.0)
    # Casts from floating point to int8 truncate; those to float8 round, but need not saturate.
    out.copy_(codes.round() if out.dtype == torch.int8 else codes.clamp(-limit, limit))
