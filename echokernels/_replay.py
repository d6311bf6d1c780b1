"""Calls that cost little on the host: what one call launched is launched again for other tensors.

Checks, tile choice and what Triton specialises a kernel on follow from metadata alone: shapes,
strides, dtypes, devices, the alignment of pointers, and scalars. So a call whose metadata was seen
before needs only new pointers in the launches that were recorded then: they go to the compiled
kernels' own launcher, past Triton's `kernel[grid](...)`, which costs several times as much. A call
that cannot be replayed (an argument of a kernel that is not traced back to a tensor of the op, a
profiler's hook on launches, a tile that is forced) goes the long way.
"""

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton

from echokernels import _tensor_map
from echokernels._counters import counter_on, is_capturing
from echokernels._launch import Launch, Recording

Replay = Callable[..., None]
"""Takes the pointers of the op's tensors, 0 for one that is absent."""

# Metadata that an op remembers. One entry takes 1 to 2 kB; a full cache starts anew.
_MOST_REPLAYS = 2048
# Combinations of pointers that a replay of several launches or descriptors remembers.
_MOST_POINTERS = 256

_knobs = triton.knobs.runtime
_enter, _exit = _knobs.launch_enter_hook, _knobs.launch_exit_hook

# The C launcher's arguments differ between versions of Triton: only where a GPU has tested them.
_calls_c_launcher = triton.__version__.startswith("3.6.") and not torch.version.hip


class _Bypass:
    """How many contexts are open, in any thread, within which every call goes the long way."""

    count = 0
    lock = threading.Lock()


IS_BYPASSED = (
    "(_bypass.count or _knobs.launch_enter_hook is not _enter or _enter.calls "
    "or _knobs.launch_exit_hook is not _exit or _exit.calls)"
)
"""An expression over `BYPASS_NAMES`, to be inlined: calling a function would cost as much again."""
BYPASS_NAMES = {"_bypass": _Bypass, "_knobs": _knobs, "_enter": _enter, "_exit": _exit}


class Known(NamedTuple):
    """What is remembered of calls of one kind."""

    scalars: Hashable  # all of the key that is not of a tensor
    matches: Callable[..., bool]  # whether the op's tensors have the metadata of the key
    replay: Replay


Cache = dict[Hashable, Known]
"""By key; under None the one that was used last."""

_caches: list[Cache] = []


@contextmanager
def bypass() -> Iterator[None]:
    """Within the context no call is replayed or remembered."""
    with _Bypass.lock:
        _Bypass.count += 1
    try:
        yield
    finally:
        with _Bypass.lock:
            _Bypass.count -= 1


def forget() -> None:
    """Drops all that is remembered: what a launcher would do has changed."""
    for cache in _caches:
        cache.clear()


def new_cache() -> Cache:
    cache: Cache = {}
    _caches.append(cache)
    return cache


def remember(
    cache: Cache,
    key: tuple[Hashable, ...],
    recording: Recording,
    tensors: Sequence[torch.Tensor | None],
) -> None:
    """Keeps the calls of `key`, whose first part is what is not of a tensor, as `recording` shows
    them. `tensors` are the op's, all different objects, in the order in which a replay takes their
    pointers."""
    try:
        replay = _make_replay(recording, tensors)
    except _NotTracedError:
        return
    if len(cache) >= _MOST_REPLAYS:
        cache.clear()
    cache[key] = Known(key[0], _matcher(tensors), replay)


def renewed(
    cache: Cache, key: tuple[Hashable, ...], tensors: Sequence[torch.Tensor | None]
) -> Known:
    """What is kept of `key`, with guards that match `tensors`: they also tell modes of PyTorch
    apart that no key has, such as inference mode."""
    known = cache[key]
    if _guards is not None:
        known = cache[key] = known._replace(matches=_matcher(tensors))
    return known


def _matcher(tensors: Sequence[torch.Tensor | None]) -> Callable[..., bool]:
    """A function of an op's tensors that are given where those of `tensors` are."""
    guards = {i: _guard(t, _guards) for i, t in enumerate(tensors) if t is not None}
    parameters = ", ".join(f"t{i}" for i in range(len(tensors)))
    checks = " and ".join(f"like{i}(t{i})" for i in guards) or "True"
    return eval(f"lambda {parameters}: {checks}", {f"like{i}": g for i, g in guards.items()})


def _guard(
    tensor: torch.Tensor, guards: Callable[..., Any] | None
) -> Callable[[torch.Tensor], bool]:
    """Whether a tensor has the shape, strides, dtype and device of this one; False may be wrong."""
    if guards is None:
        return lambda _: False
    sizes, strides = [[*tensor.shape]], [[*tensor.stride()]]
    return guards(tensor, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


def _pytorch_guards() -> Callable[..., Any] | None:
    """They are not part of PyTorch's public interface: None unless they tell apart what differs."""
    try:
        from torch._C._dynamo.guards import TensorGuards

        x = torch.empty(2, 3)
        check = _guard(x, TensorGuards)
        others = (x[:1], x[0], x.half(), x.t(), torch.empty(3, 2).t(), x.to("meta"))
        if check(torch.empty(2, 3)) and not any(check(other) for other in others):
            return TensorGuards
    except (ImportError, TypeError, SystemError, RuntimeError):
        pass
    return None


_guards = _pytorch_guards()


class _NotTracedError(Exception):
    """A kernel's argument that is no tensor of the op, no view of one and no scratch."""


class _Slot(NamedTuple):
    """Where a pointer goes: parameter `place` gets that of `source`, `offset` bytes on."""

    place: int
    source: int  # a tensor of the op, or behind those, scratch, or behind that, a counter
    offset: int
    at: Callable[[int], Any] | None = None  # from the pointer to a TMA descriptor based there


def _make_replay(recording: Recording, tensors: Sequence[torch.Tensor | None]) -> Replay:
    if not recording.launches:
        return _launch_nothing
    sources = [*tensors, *recording.scratch, *recording.counters]
    device = next(t.get_device() for t in tensors if t is not None)
    scratch = [(tuple(s.shape), s.dtype, s.device) for s in recording.scratch]
    steps = [_step(launch, sources) for launch in recording.launches]
    if _is_plain(steps) and not recording.counters:
        replay = _launch_plain(steps[0], device)
    else:
        counts = [c.numel() for c in recording.counters]
        replay = _launch_all(steps, device, counts)
    if scratch:
        replay = _with_scratch(replay, scratch)
    return replay if torch.cuda.device_count() == 1 else _on_device(replay, device)


class _Step(NamedTuple):
    """run(*grid, stream, *head, *template with the pointers of `slots`)."""

    run: Callable[..., None]
    head: tuple[Any, ...]
    grid: tuple[int, ...]
    template: list[Any]
    slots: list[_Slot]


def _step(launch: Launch, sources: Sequence[torch.Tensor | None]) -> _Step:
    compiled, grid, values = launch
    run, head, argument_of = _entry(compiled)
    template: list[Any] = []
    slots = []
    for value in values:
        if isinstance(value, torch.Tensor):
            slots.append(_Slot(len(template), *_trace(value, sources)))
            template.append(None)
        elif isinstance(getattr(value, "base", None), torch.Tensor):
            at, rest = argument_of(value)
            slots.append(_Slot(len(template), *_trace(value.base, sources), at))
            template += [None, *rest]
        else:
            template.append(value)
    return _Step(run, head, (*grid, 1, 1)[:3], template, slots)


def _entry(
    compiled: Any,
) -> tuple[Callable[..., None], tuple[Any, ...], Callable[[Any], _tensor_map.Argument]]:
    """What launches a compiled kernel, what it takes between the stream and the values, and what
    it takes for TMA descriptors, asked for in order."""
    run = compiled.run
    if _calls_c_launcher and not (run.global_scratch_size or run.profile_scratch_size):
        # `run` is Python and adds 1.5 us on an H200's host to what it calls.
        flags = (run.launch_cooperative_grid, run.launch_pdl)
        hooks_and_scratch = (None, None, compiled.packed_metadata, None, None, None)
        head: tuple[Any, ...] = (compiled.function, *flags, *hooks_and_scratch)
        if (behind := _tensor_map.unwrapped(run.launch)) is None:
            return run.launch, head, _tensor_map.for_python_launcher
        launcher, notes = behind
        in_order = iter(notes)
        return launcher, head, lambda x: _tensor_map.for_c_launcher(x, next(in_order))
    head = (compiled.function, compiled.packed_metadata, None, None, None)
    return run, head, _tensor_map.for_python_launcher


def _trace(value: torch.Tensor, sources: Sequence[torch.Tensor | None]) -> tuple[int, int]:
    for index, source in enumerate(sources):
        if value is source:
            return index, 0
    storage = value.untyped_storage().data_ptr()
    views = [
        index
        for index, source in enumerate(sources)
        if source is not None and source.untyped_storage().data_ptr() == storage
    ]
    # Which of several tensors in one memory it is a view of cannot be told.
    if len(views) != 1:
        raise _NotTracedError
    source = sources[views[0]]
    assert source is not None
    return views[0], value.data_ptr() - source.data_ptr()


def _launch_nothing(*_: int) -> None:
    pass


def _is_plain(steps: list[_Step]) -> bool:
    """One launch, and pointers go to it as they are."""
    return len(steps) == 1 and not any(s.offset or s.at is not None for s in steps[0].slots)


def _launch_plain(step: _Step, device: int) -> Replay:
    """What `_launch_all` does with a plain launch, at less cost: nearly every small op is one."""
    run, head, grid, template, slots = step
    places = [(slot.place, slot.source) for slot in slots]
    current_stream = torch._C._cuda_getCurrentRawStream

    def replay(*pointers: int) -> None:
        values = template.copy()
        for index, source in places:
            values[index] = pointers[source]
        run(*grid, current_stream(device), *head, *values)

    return replay


def _launch_all(steps: list[_Step], device: int, counts: list[int]) -> Replay:
    """`counts`: the sizes of the counters. Values of parameters are remembered for pointers that
    come again, as those of activations and of scratch memory do in every layer of a model."""
    remembered: dict[tuple[int, tuple[int, ...]], list[list[Any]]] = {}
    current_stream = torch._C._cuda_getCurrentRawStream

    def replay(*pointers: int) -> None:
        stream = current_stream(device)
        place = (stream, pointers)
        is_unique = bool(counts) and is_capturing()
        found = None if is_unique else remembered.get(place)
        if found is None:
            pointers += tuple(counter_on(device, stream, n).data_ptr() for n in counts)
            found = [_values(step, pointers) for step in steps]
            if not is_unique:
                if len(remembered) >= _MOST_POINTERS:
                    remembered.clear()
                remembered[place] = found
        for (run, head, grid, _, _), values in zip(steps, found):  # noqa: B905
            run(*grid, stream, *head, *values)

    return replay


def _values(step: _Step, pointers: tuple[int, ...]) -> list[Any]:
    values = step.template.copy()
    for place, source, offset, at in step.slots:
        pointer = pointers[source] + offset
        values[place] = pointer if at is None else at(pointer)
    return values


def _with_scratch(replay: Replay, scratch: list[tuple[Any, ...]]) -> Replay:
    def with_scratch(*pointers: int) -> None:
        memory = [torch.empty(shape, dtype=dtype, device=at) for shape, dtype, at in scratch]
        replay(*pointers, *(piece.data_ptr() for piece in memory))

    return with_scratch


def _on_device(replay: Replay, device: int) -> Replay:
    def on_device(*pointers: int) -> None:
        if torch._C._cuda_getDevice() == device:
            replay(*pointers)
        else:
            with torch.cuda.device(device):
                replay(*pointers)

    return on_device
