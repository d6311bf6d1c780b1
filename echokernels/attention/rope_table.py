"""Tables of cosines and sines for the rotary embedding.

    inv_freq[i] = theta^(-2i / rotary_dim), changed by the model's scaling
    table[p] = [cos(p * inv_freq) | sin(p * inv_freq)]

Everything is in float64 and rounded to fp32 at the end: an fp32 angle just below 131,072 would be
off by up to 0.004. Scalings are those of Hugging Face configurations, plus "factors", the form in
which GGUF files carry llama3's.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


def rope_table(
    rotary_dim: int,
    max_position: int,
    theta: float = 10_000.0,
    scaling: Mapping[str, Any] | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """The `cos_sin_cache` of `rotary_embedding`: fp32 [max_position, rotary_dim], cosines first.

    scaling: None, or fields of a Hugging Face configuration: "rope_type" (or, older, "type") and
        for "default" none,
        for "linear" factor,
        for "llama3" factor, low_freq_factor, high_freq_factor, original_max_position_embeddings,
        for "factors" factors: the rotary_dim / 2 numbers that the frequencies are divided by.
    Other fields are ignored.

    Raises ValueError for another type, a missing field or a number out of range.
    """
    if rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(f"rotary_dim is {rotary_dim}, must be even and at least 2")
    if max_position < 0:
        raise ValueError(f"max_position is {max_position}, must be at least 0")
    if not 0 < theta < math.inf:
        raise ValueError(f"theta is {theta}, must be positive and finite")
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device) / rotary_dim
    inv_freq = _scaled(theta**-exponents, {"rope_type": "default"} if scaling is None else scaling)
    positions = torch.arange(max_position, dtype=torch.float64, device=device)
    angles = positions[:, None] * inv_freq
    table = torch.empty(max_position, rotary_dim, dtype=torch.float32, device=device)
    table[:, : rotary_dim // 2] = angles.cos()
    table[:, rotary_dim // 2 :] = angles.sin_()
    return table


def _scaled(inv_freq: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind not in _SCALINGS:
        raise ValueError(f"scaling's rope_type is {kind!r}, must be one of {', '.join(_SCALINGS)}")
    return _SCALINGS[kind](inv_freq, scaling)


def _default(inv_freq: torch.Tensor, _scaling: Mapping[str, Any]) -> torch.Tensor:
    return inv_freq


def _linear(inv_freq: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    return inv_freq / _positive(scaling, "factor")


def _llama3(inv_freq: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between in proportion."""
    factor = _positive(scaling, "factor")
    low = _positive(scaling, "low_freq_factor")
    high = _positive(scaling, "high_freq_factor")
    if high <= low:
        raise ValueError(
            f"scaling's high_freq_factor is {high}, must exceed low_freq_factor = {low}"
        )
    original = _positive(scaling, "original_max_position_embeddings")
    turns = original * inv_freq / (2 * math.pi)  # over the original context
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return inv_freq * (kept + (1 - kept) / factor)


def _factors(inv_freq: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    factors: Sequence[float] = _required(scaling, "factors")
    if len(factors) != len(inv_freq):
        raise ValueError(
            f"scaling's factors are {len(factors)}, must be rotary_dim / 2 = {len(inv_freq)}"
        )
    divisors = torch.as_tensor(factors, dtype=torch.float64, device=inv_freq.device)
    if not bool((divisors > 0).all()):
        raise ValueError(f"scaling's factors are {factors}, must all be positive")
    return inv_freq / divisors


_SCALINGS: dict[str, Callable[[torch.Tensor, Mapping[str, Any]], torch.Tensor]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "factors": _factors,
}


def _positive(scaling: Mapping[str, Any], key: str) -> float:
    value = float(_required(scaling, key))
    if not 0 < value < math.inf:
        raise ValueError(f"scaling's {key} is {value}, must be positive and finite")
    return value


def _required(scaling: Mapping[str, Any], key: str) -> Any:
    if scaling.get(key) is None:
        raise ValueError(f"scaling is {dict(scaling)}, must have {key!r}")
    return scaling[key]
