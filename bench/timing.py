"""How long a call takes: on the device alone, on the host alone, and until its result is there.

Device time comes from replays of a CUDA graph, so the host's launches cost nothing. The calls of a
graph rotate among input sets that together exceed the L2 cache, so that small inputs too come from
memory, and what earlier kernels asked that cache to keep is dropped first. Implementations take
turns, in random order: one after the other they would differ by the clock that the device's power
and heat allow at the time. Host time comes from loops of calls that nothing waits for, too few to
fill the queue of the device. All times are medians, in microseconds.
"""

import ctypes
import math
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch

Call = Callable[[], Any]

MAX_SETS = 16_384  # 120 MB, twice the L2 of an H200, in sets of 8 kB
_MANY_SETS = 64
_CPU_SETS = 2  # a CPU's caches are not worth the memory: the times there only test this harness
_ROUND_US = 2_000.0  # the least that a graph should take: its start costs some microseconds
_BUDGET_US = 60_000.0
_TURNS = 8
# A third of it before the time is taken, to be at the implementation's own clock.
_TURN_US = 15_000.0
_WARM_UP_CALLS = 3
_HOST_CALLS = 32  # between waits: a device's queue holds 1,024 before launching waits for it
_HOST_ROUNDS = 100


@dataclass(frozen=True)
class Round:
    """`run()` does `num_calls` calls, whole rotations of `calls`, without waiting for them."""

    run: Call
    num_calls: int
    calls: Sequence[Call]  # kept because a graph does not keep the inputs that it reads alive


def num_sets(set_bytes: int, device: torch.device) -> int:
    """How many input sets of `set_bytes` make each call miss the L2 cache of `device`.

    They exceed it twice, and up to 64 sets exceed it 64 times: lines that a kernel asks the cache
    to keep wait there for the next rotation, and should be no more than 1% or 2% of all.
    """
    if device.type != "cuda":
        return _CPU_SETS
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    twice, often = (times * l2_bytes // set_bytes + 1 for times in (2, 64))
    return min(max(twice, min(often, _MANY_SETS)), MAX_SETS)


def graph_us(
    works: Sequence[Round],
    device: torch.device,
    *,
    turns: int = _TURNS,
    turn_us: float = _TURN_US,
) -> list[float]:
    """Times of one call of each of `works` on the device, over replays. On a CPU: `eager_us`. Each
    is run for turn_us in each of the turns."""
    if device.type != "cuda":
        return [eager_us(work.calls, device) for work in works]
    estimates = [_replay_us(work, 2) for work in works]
    times: list[list[float]] = [[] for _ in works]
    order = random.Random(0)
    for _ in range(turns):
        for index in order.sample(range(len(works)), len(works)):
            _drop_kept_lines(device)
            repeats = _within(3, turn_us / estimates[index], 50)
            times[index] += _replays_us(works[index], repeats)[repeats // 3 :]
    return [
        statistics.median(of_work) / work.num_calls
        for of_work, work in zip(times, works, strict=True)
    ]


def eager_us(calls: Sequence[Call], device: torch.device) -> float:
    """Time of one call until its result is there: wall clock of a batch and the wait for it."""
    estimate = min(_wall_us(calls[:1], device) for _ in range(_WARM_UP_CALLS))
    size = _within(3, _BUDGET_US / 5 / estimate, 200)
    batch = [calls[i % len(calls)] for i in range(size)]
    return statistics.median(_wall_us(batch, device) for _ in range(5)) / size


def host_us(calls: Sequence[Call], device: torch.device) -> list[float]:
    """Time that each of `calls` keeps the host, measured in turn, so that they have the same luck.

    On a CPU, where nothing is queued, it includes the work itself.
    """
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(_WARM_UP_CALLS + _HOST_ROUNDS):
        for call, of_call in zip(calls, times, strict=True):
            synchronize(device)
            of_call.append(_loop_us([call] * _HOST_CALLS) / _HOST_CALLS)
    return [statistics.median(of_call[_WARM_UP_CALLS:]) for of_call in times]


def make_round(calls: Sequence[Call], device: torch.device) -> Round:
    """Calls to time together: a captured graph on a GPU, a loop over `calls` on a CPU."""
    if device.type != "cuda":
        return Round(lambda: _run_all(calls), len(calls), calls)
    # What is compiled or created at the first call must not fall into the capture.
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        _run_all(calls[:_WARM_UP_CALLS])
    torch.cuda.current_stream(device).wait_stream(side)

    work = _capture(calls, rotations=1)
    rotations = math.ceil(_ROUND_US / _replay_us(work, 2))
    return work if rotations == 1 else _capture(calls, rotations)


def _capture(calls: Sequence[Call], rotations: int) -> Round:
    graph = torch.cuda.CUDAGraph()
    # Outputs live for a rotation. Freed at once, they would share a block that never leaves the L2.
    outputs: deque[Any] = deque(maxlen=len(calls))
    with torch.cuda.graph(graph):
        for call in list(calls) * rotations:
            outputs.append(call())
    return Round(graph.replay, rotations * len(calls), calls)


def _replay_us(work: Round, repeats: int) -> float:
    return statistics.median(_replays_us(work, repeats))


def _replays_us(work: Round, repeats: int) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    # Never idle from here on: the host launches a replay while the one before it runs.
    work.run()
    events[0].record()
    for event in events[1:]:
        work.run()
        event.record()
    events[-1].synchronize()
    return [a.elapsed_time(b) * 1e3 for a, b in pairwise(events)]


def _drop_kept_lines(device: torch.device) -> None:
    """Lines of the L2 cache that hints of earlier kernels keep become like any other.

    Else these stay for ever, and a kernel that works in place on the same inputs finds them there.
    """
    synchronize(device)
    if torch.version.cuda is not None:
        with torch.cuda.device(device):
            status = ctypes.CDLL("libcuda.so.1").cuCtxResetPersistingL2Cache()
        assert status == 0, f"cuCtxResetPersistingL2Cache: error {status}"


def _wall_us(calls: Sequence[Call], device: torch.device) -> float:
    synchronize(device)
    return _loop_us([*calls, partial(synchronize, device)])


def _loop_us(calls: Sequence[Call]) -> float:
    start = time.perf_counter()
    _run_all(calls)
    return (time.perf_counter() - start) * 1e6


def _run_all(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _within(low: int, value: float, high: int) -> int:
    return max(low, min(int(value), high))
