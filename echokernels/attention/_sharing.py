"""How the keys of a batch are shared out: forced, calibrated, or the default of a kernel."""

import functools
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, NamedTuple

import torch

from echokernels import _calibration
from echokernels._replay import bypass, forget

Kernel = Literal["hopper", "portable"]


class Sharing(NamedTuple):
    """What is best on a GPU for calls of one kind; `echokernels calibrate` measures it."""

    block_n: int  # keys of a tile
    per_sm: int  # programs on an SM, of which each has a share


class Kind(NamedTuple):
    """Calls that have a best sharing in common."""

    kernel: Kernel
    head_dim: int
    dtype: torch.dtype
    group: int  # query heads of a KV head
    is_large: bool  # more sequences times KV heads than SMs

    @property
    def key(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        size = "large" if self.is_large else "small"
        return f"decode {self.kernel} d{self.head_dim} {dtype} g{self.group} {size}"


_forced: ContextVar[Sharing | None] = ContextVar("echokernels_sharing", default=None)


@contextmanager
def forced_sharing(sharing: Sharing) -> Iterator[None]:
    """Within the context keys are shared out so, whatever was calibrated."""
    token = _forced.set(sharing)
    try:
        with bypass():
            yield
    finally:
        _forced.reset(token)


def sharing_of(
    device: torch.device, kind: Kind, default: Sharing, allowed: Collection[Sharing]
) -> Sharing:
    """What was calibrated for tiles that the kernel does not have is passed over."""
    if (forced := _forced.get()) is not None:
        return forced
    if device.type != "cuda" or not torch.cuda.is_available():
        return default
    entry = _calibrated(torch.cuda.get_device_name(device)).get(kind.key, {})
    found = Sharing(entry.get("block_n", 0), entry.get("per_sm", 0))
    return found if found in allowed else default


@functools.cache
def _calibrated(gpu: str) -> _calibration.Entries:
    return _calibration.load(gpu)


def forget_calibration() -> None:
    """What is kept is read again at the next call."""
    _calibrated.cache_clear()
    forget()
