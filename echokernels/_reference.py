"""What the references of all families share."""

import torch


def accumulable(x: torch.Tensor) -> torch.Tensor:
    """`x` in the dtype that references compute in: float64 as it is, all else float32."""
    return x if x.dtype == torch.float64 else x.float()
