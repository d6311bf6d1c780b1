"""What RoPE is: pairs as complex numbers, turned by exact angles, in float64, with nothing shared
with the package."""

import torch

THETA = 10_000.0


def oracle(
    x: torch.Tensor, positions: torch.Tensor, rotary_dim: int, is_neox: bool
) -> torch.Tensor:
    """x: [tokens, heads, head_dim]."""
    out = x.double().cpu().clone()
    rotary = out[..., :rotary_dim].unflatten(-1, (2, -1) if is_neox else (-1, 2))
    pair_dim = -2 if is_neox else -1
    first, second = rotary.unbind(pair_dim)
    inv_freq = THETA ** (-torch.arange(0, rotary_dim, 2).double() / rotary_dim)
    angle = positions.cpu().double()[:, None, None] * inv_freq
    turned = torch.complex(first, second) * torch.exp(1j * angle)
    out[..., :rotary_dim] = torch.stack([turned.real, turned.imag], pair_dim).flatten(-2)
    return out
