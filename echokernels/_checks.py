"""Checks of arguments, with one form of error: `<argument> is <value>, must be <what is allowed>`.

They read metadata only (shape, dtype, stride, device), so they hold on fake tensors too and never
wait for a GPU. Checks that read device memory (an op's `debug_check`) run only with
`ECHOKERNELS_DEBUG=1`.
"""

import os
from collections.abc import Collection, Sequence

import torch

DEBUG = os.environ.get("ECHOKERNELS_DEBUG") == "1"
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
INDEX = (torch.int32, torch.int64)


def check_dtype(name: str, tensor: torch.Tensor, allowed: Sequence[torch.dtype]) -> None:
    if tensor.dtype not in allowed:
        names = ", ".join(_short(d) for d in allowed)
        raise TypeError(f"{name}.dtype is {_short(tensor.dtype)}, must be {names}")


def check_shape(name: str, tensor: torch.Tensor, *shape: int | None) -> None:
    """`None` stands for any size."""
    actual = tensor.shape
    if len(actual) != len(shape) or any(
        want is not None and have != want for have, want in zip(actual, shape, strict=True)
    ):
        wanted = ", ".join("*" if want is None else str(want) for want in shape)
        raise ValueError(f"{name}.shape is {tuple(actual)}, must be ({wanted})")


def check_dim(name: str, tensor: torch.Tensor, *dims: int) -> None:
    if tensor.dim() not in dims:
        allowed = " or ".join(map(str, dims))
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, must have {allowed} dimensions")


def check_last_contiguous(name: str, tensor: torch.Tensor) -> None:
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name}.stride() is {tensor.stride()}, must be 1 in the last dimension: "
            "pass a tensor whose last dimension is contiguous"
        )


def check_contiguous(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(f"{name}.stride() is {tensor.stride()}, must be contiguous")


def check_bytes(name: str, tensor: torch.Tensor, least: int, see: str) -> None:
    """`see`: the function that tells how many."""
    size = tensor.numel() * tensor.element_size()
    if size < least:
        raise ValueError(f"{name} has {size} bytes, must have at least {least}: see {see}")


def check_same_device(anchor: str, tensor: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Every tensor given must be on the device of `tensor`."""
    for name, other in others.items():
        if other is not None and other.device != tensor.device:
            raise ValueError(
                f"{name}.device is {other.device}, must be {tensor.device} as {anchor}'s is"
            )


def check_range(name: str, value: float, low: float, high: float | None = None) -> None:
    # Written so that NaN fails.
    if not (value >= low and (high is None or value <= high)):
        allowed = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name} is {value}, must be {allowed}")


def check_one_of(name: str, value: object, allowed: Collection[object]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}, must be {', '.join(map(repr, allowed))}")


def check_absent(name: str, value: object, when: str) -> None:
    if value is not None:
        raise ValueError(f"{name} is given, must be None: {when}")


def check_indices(name: str, indices: torch.Tensor, low: int, high: int) -> None:
    """All of `indices` must be in [low, high). Reads them: for an op's `debug_check` only."""
    if indices.numel() == 0:
        return
    least, most = int(indices.min()), int(indices.max())
    if least < low or most >= high:
        raise ValueError(f"{name} holds {least}..{most}, must lie in [{low}, {high})")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
