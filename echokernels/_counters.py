"""Counters in device memory that the programs of one launch share.

All numbers of a counter are 0 before the launch, and its programs leave them so: the last one to
use one sets it back. Zeroing them by a kernel of its own would cost as much as launching a small
kernel, on the host and on the device.

Launches on one stream follow one another and share a counter. A launch that is captured into a CUDA
graph may run beside any other, so it gets one that nothing else will ever use.
"""

import threading
from collections.abc import Callable

import torch

_AT_ONCE = 4096  # counters of an allocation; captured launches use one each, streams too


class _Supply:
    """Of one device, for counters of `count` numbers."""

    def __init__(self, device: torch.device, count: int) -> None:
        self.device = device
        self.count = count
        self.lock = threading.Lock()
        self.of_stream: dict[int, torch.Tensor] = {}
        self.unused: list[torch.Tensor] = []
        self.kept: list[torch.Tensor] = []

    def take(self) -> torch.Tensor:
        with self.lock:
            if self.unused:
                return self.unused.pop()
            if is_capturing():
                # The graph zeroes it itself, before every replay.
                self.kept.append(torch.zeros(self.count, dtype=torch.int32, device=self.device))
                return self.kept[-1]
            memory = torch.zeros((_AT_ONCE, self.count), dtype=torch.int32, device=self.device)
            torch.cuda.current_stream(self.device).synchronize()
            self.unused = [*memory.unbind()]
            return self.unused.pop()


is_capturing: Callable[[], bool] = (
    torch._C._cuda_isCurrentStreamCapturing if torch.backends.cuda.is_built() else lambda: False
)
"""Whether the current stream is; PyTorch's own function of this name costs twice as much."""

_supplies: dict[tuple[int, int], _Supply] = {}


def counter(device: torch.device, count: int) -> torch.Tensor:
    """Int32 [count], zeros, for one launch on the current stream of `device`."""
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device)
    index = torch.cuda.current_device() if device.index is None else device.index
    with torch.cuda.device(index):
        return counter_on(index, torch.cuda.current_stream().cuda_stream, count)


def counter_on(device: int, stream: int, count: int) -> torch.Tensor:
    """The same by a stream's handle; device and stream are the current ones."""
    supply = _supplies.get((device, count))
    if supply is None:
        new = _Supply(torch.device("cuda", device), count)
        supply = _supplies.setdefault((device, count), new)
    if is_capturing():
        return supply.take()
    found = supply.of_stream.get(stream)
    if found is None:
        found = supply.of_stream.setdefault(stream, supply.take())
    return found
