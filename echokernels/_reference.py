"""What the references of all families share."""

import torch


def accumulable(x: torch.Tensor) -> torch.Tensor:
    """`x` in the dtype that references compute in: float64 as it is, all else float32."""
    return x if x.dtype == torch.float64 else x.float()


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x weight^T + bias, not rounded to the dtype of `x`."""
    y = accumulable(x) @ accumulable(weight).T
    return y if bias is None else y + bias
