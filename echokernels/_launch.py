"""Launching kernels: every launch of the package goes through `launch`.

What a call of an op launches can be recorded, which `_replay.py` builds on.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from echokernels import _counters

# CUDA's limits on the three dimensions of a grid.
_MAX_GRID = (2**31 - 1, 65_535, 65_535)


class Launch(NamedTuple):
    """One launch: Triton's compiled kernel, and the values of all its parameters in order."""

    compiled: Any
    grid: tuple[int, ...]
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Recording:
    """What a launcher launched, and the scratch and counters it took, in order."""

    launches: list[Launch] = field(default_factory=list)
    scratch: list[torch.Tensor] = field(default_factory=list)
    counters: list[torch.Tensor] = field(default_factory=list)


class _ThisThread(threading.local):
    recording: Recording | None = None


_this_thread = _ThisThread()


@contextmanager
def record() -> Iterator[Recording]:
    """Within the context, what this thread launches is written down as well."""
    outer, recording = _this_thread.recording, Recording()
    _this_thread.recording = recording
    try:
        yield recording
    finally:
        _this_thread.recording = outer


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Runs `kernel` over `grid` on the device and current stream of its first argument, a tensor.

    `options` are the kernel's constexpr arguments, `num_warps` and `num_stages`. An empty grid
    launches nothing. The current device is left as it was.

    Raises ValueError when a dimension of the grid is beyond what the hardware can launch.
    """
    if 0 in grid:
        return
    for size, limit in zip(grid, _MAX_GRID, strict=False):
        if size > limit:
            raise ValueError(
                f"the launch grid is {grid}, each dimension must be at most {_MAX_GRID}"
            )
    device = args[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            compiled = _run(kernel, grid, args, options)
    else:
        compiled = _run(kernel, grid, args, options)
    if (recording := _this_thread.recording) is not None:
        recording.launches.append(Launch(compiled, grid, _values(kernel, args, options)))


def scratch(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Uninitialised memory that the kernels of one call share and nothing reads after them."""
    memory = torch.empty(shape, dtype=dtype, device=device)
    if (recording := _this_thread.recording) is not None:
        recording.scratch.append(memory)
    return memory


def counter(device: torch.device, count: int) -> torch.Tensor:
    """Int32 [count], zeros, that the programs of one launch share and leave as zeros."""
    memory = _counters.counter(device, count)
    if (recording := _this_thread.recording) is not None:
        recording.counters.append(memory)
    return memory


def _run(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return kernel[grid](*args, **options)


def _values(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    rest = kernel.params[len(args) :]
    return (*args, *(options.get(parameter.name, parameter.default) for parameter in rest))
