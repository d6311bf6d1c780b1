"""Hypothesis strategies and tensor makers shared by the tests of ops."""

import torch
from hypothesis import strategies as st

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

dtypes = st.sampled_from(FLOAT_DTYPES)
seeds = st.integers(0, 2**31 - 1)
# 0 and 1 are the edges; the others are odd on purpose: nothing divides a tile.
token_counts = st.sampled_from([0, 1, 2, 3, 5, 17, 33])


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(
    *shape: int, dtype: torch.dtype, device: torch.device, gen: torch.Generator, scale: float = 1.0
) -> torch.Tensor:
    """Drawn on the CPU in float64, so the same numbers on every device; rounded to `dtype`."""
    values = torch.randn(*shape, generator=gen, dtype=torch.float64) * scale
    return values.to(dtype).to(device)


def strided_randn(
    *shape: int,
    dtype: torch.dtype,
    device: torch.device,
    gen: torch.Generator,
    pad: int,
    scale: float = 1.0,
) -> torch.Tensor:
    """Like `randn`, but a slice of a wider tensor: rows are `pad` elements apart, and NaN lies
    between them."""
    if pad == 0:
        return randn(*shape, dtype=dtype, device=device, gen=gen, scale=scale)
    wide = poisoned(*shape[:-1], shape[-1] + pad, dtype=dtype, device=device)
    wide[..., : shape[-1]] = randn(*shape, dtype=dtype, device=device, gen=gen, scale=scale)
    return wide[..., : shape[-1]]


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """NaN everywhere (a rare integer for integer dtypes): what an op must overwrite, and must not
    read."""
    if dtype.is_floating_point:
        return torch.full(shape, float("nan"), dtype=dtype, device=device)
    return torch.full(shape, torch.iinfo(dtype).min + 7, dtype=dtype, device=device)


def boundaries(lens, dtype, device):
    """cu_seqlens of sequences of these lengths."""
    return torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=dtype, device=device)
