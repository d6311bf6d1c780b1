"""Replays of calls: the launches of a call, made again for other tensors of the same metadata.

On the CPU with a stand-in for Triton's compiled kernels, which notes what it is launched with; on a
GPU with every op.
"""

import threading
from types import SimpleNamespace

import pytest
import torch
import triton

import echokernels
from echokernels import _launch, _replay
from echokernels._dispatch import cached_call
from echokernels._library import OPS
from echokernels._tuning import TileConfig, forced
from tests.ops.examples import examples
from tests.ops.test_compile import clones, tensors

NAMES = sorted(OPS)


class Kernel:
    """A kernel of (out_ptr, x_ptr, extra_ptr, size, BLOCK) and its own compiled form."""

    def __init__(self):
        self.function, self.packed_metadata = "function", "metadata"
        names = ("out_ptr", "x_ptr", "extra_ptr", "size", "BLOCK")
        self.params = [SimpleNamespace(name=name, default=None) for name in names]
        self.slow, self.fast = [], []

    def __getitem__(self, grid):
        return lambda *args, **options: self.slow.append((grid, args, options)) or self

    def run(self, *args):
        self.fast.append(args)


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: "stream", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(_replay, "_calls_c_launcher", False)
    return Kernel()


def op(kernel, extra=lambda _out, _x: None, calls=None):
    """copy(out, x, times=1), which launches once for each of `times`."""

    def run(out, x, times=1):
        if calls is not None:
            calls.append(times)
        for _ in range(times):
            _launch.launch(kernel, (x.shape[0],), out, x, extra(out, x), x.stride(0), BLOCK=64)

    schema = "copy(Tensor(a!) out, Tensor x, int times=1) -> ()"
    return cached_call(schema, run, _replay.new_cache())


def fast_pointers(kernel):
    return [args[9:] for args in kernel.fast]


def test_the_second_call_is_replayed_with_its_own_pointers(kernel):
    call = op(kernel)
    call(torch.zeros(4, 8), torch.zeros(4, 8))
    out, x = torch.zeros(4, 8), torch.zeros(4, 8)
    call(out, x)
    assert len(kernel.slow) == 1
    ((*head, out_ptr, x_ptr, extra, size, block),) = kernel.fast
    assert head == [4, 1, 1, "stream", "function", "metadata", None, None, None]
    assert (out_ptr, x_ptr) == (out.data_ptr(), x.data_ptr())
    assert (extra, size, block) == (None, 8, 64)


@pytest.mark.parametrize(("global_scratch_size", "goes_straight"), [(0, True), (64, False)])
def test_tritons_own_launcher_is_passed_unless_it_has_to_allocate(
    kernel, monkeypatch, global_scratch_size, goes_straight
):
    def python_launcher(*args):
        kernel.fast.append(args)

    straight = []
    python_launcher.launch = lambda *args: straight.append(args)
    python_launcher.launch_cooperative_grid, python_launcher.launch_pdl = "cooperative", "pdl"
    python_launcher.global_scratch_size = global_scratch_size
    python_launcher.profile_scratch_size = 0
    kernel.run = python_launcher
    monkeypatch.setattr(_replay, "_calls_c_launcher", True)
    call = op(kernel)
    for _ in range(2):
        call(torch.zeros(4, 8), torch.zeros(4, 8))
    assert (len(straight), len(kernel.fast)) == (goes_straight, not goes_straight)
    for head in (args[:13] for args in straight):
        assert head == (4, 1, 1, "stream", "function", "cooperative", "pdl",
                        None, None, "metadata", None, None, None)  # fmt: skip


@pytest.mark.parametrize(
    "other",
    [
        (torch.zeros(5, 8), torch.zeros(5, 8)),
        (torch.zeros(4, 8), torch.zeros(4, 9)[:, :8]),
        (torch.zeros(4, 8), torch.zeros(4, 8, dtype=torch.int32)),
        (torch.zeros(4, 8), torch.zeros(33)[1:].view(4, 8)),
        (torch.zeros(4, 8), torch.zeros(4, 8), 2),
    ],
    ids=["shape", "stride", "dtype", "alignment", "scalar"],
)
def test_other_metadata_goes_the_long_way(kernel, other):
    call = op(kernel)
    call(torch.zeros(4, 8), torch.zeros(4, 8))
    call(*other)
    assert not kernel.fast
    call(*other)
    assert kernel.fast


def test_a_tensor_given_twice_and_two_tensors_are_told_apart(kernel):
    call = op(kernel)
    x, out = torch.zeros(4, 8), torch.zeros(4, 8)
    call(x, x)
    call(out, x)
    call(x, x)
    pairs = [pointers[:2] for pointers in fast_pointers(kernel)]
    assert pairs == [(out.data_ptr(), x.data_ptr()), (x.data_ptr(), x.data_ptr())]


def test_a_view_of_an_argument_is_followed(kernel):
    call = op(kernel, extra=lambda _, x: x[1:, 2:])
    for _ in range(2):
        x = torch.zeros(4, 8)
        call(torch.zeros(4, 8), x)
    assert fast_pointers(kernel)[0][2] == x.data_ptr() + (8 + 2) * 4


def test_a_view_that_may_be_of_either_argument_is_not(kernel):
    call = op(kernel, extra=lambda _, x: x[1:])
    for _ in range(3):
        packed = torch.zeros(8, 8)
        call(packed[:4], packed[4:])
    assert len(kernel.slow) == 3
    assert not kernel.fast


def test_memory_from_nowhere_is_not_replayed(kernel):
    keep = torch.zeros(3)
    call = op(kernel, extra=lambda *_: keep)
    for _ in range(3):
        call(torch.zeros(4, 8), torch.zeros(4, 8))
    assert len(kernel.slow) == 3


def test_scratch_is_allocated_anew_at_each_replay(kernel, monkeypatch):
    def extra(out, _):
        return _launch.scratch((2, 8), torch.int32, out.device)[1:]

    call = op(kernel, extra)
    call(torch.zeros(4, 8), torch.zeros(4, 8))
    taken = []
    empty = torch.empty

    def noting(*args, **kwargs):
        taken.append(empty(*args, **kwargs))
        return taken[-1]

    monkeypatch.setattr(torch, "empty", noting)
    for _ in range(2):
        call(torch.zeros(4, 8), torch.zeros(4, 8))
    assert [(t.shape, t.dtype) for t in taken] == [((2, 8), torch.int32)] * 2
    assert [p[2] for p in fast_pointers(kernel)] == [t.data_ptr() + 8 * 4 for t in taken]


def test_counters_are_those_of_the_stream_at_each_replay(kernel, monkeypatch):
    counters = {"a": torch.zeros(2, dtype=torch.int32), "b": torch.zeros(2, dtype=torch.int32)}
    current = ["a"]
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: current[0])
    monkeypatch.setattr(_launch._counters, "counter", lambda *_: counters[current[0]])
    monkeypatch.setattr(_replay, "counter_on", lambda *_: counters[current[0]])
    call = op(kernel, extra=lambda out, _: _launch.counter(out.device, 2))
    pairs = [(torch.zeros(4, 8), torch.zeros(4, 8)) for _ in range(2)]
    call(*pairs[0])
    for stream in ("a", "b", "a", "b"):
        current[0] = stream
        for out, x in pairs:
            call(out, x)
            assert fast_pointers(kernel)[-1][:3] == (
                out.data_ptr(), x.data_ptr(), counters[stream].data_ptr(),
            )  # fmt: skip
    assert len(kernel.slow) == 1


def test_each_captured_replay_takes_a_counter(kernel, monkeypatch):
    taken = []

    def take(*_):
        taken.append(torch.zeros(2, dtype=torch.int32))
        return taken[-1]

    monkeypatch.setattr(_launch._counters, "counter", take)
    monkeypatch.setattr(_replay, "counter_on", take)
    monkeypatch.setattr(_replay, "is_capturing", lambda: True)
    call = op(kernel, extra=lambda out, _: _launch.counter(out.device, 2))
    out, x = torch.zeros(4, 8), torch.zeros(4, 8)
    for _ in range(3):
        call(out, x)
    pointers = [pointers[2] for pointers in fast_pointers(kernel)]
    assert pointers == [counter.data_ptr() for counter in taken[1:]]
    assert len(set(pointers)) == 2


def test_remembered_pointers_start_anew_when_there_are_many(kernel, monkeypatch):
    monkeypatch.setattr(_replay, "_MOST_POINTERS", 2)
    call = op(kernel)
    keep = [(torch.zeros(4, 8), torch.zeros(4, 8)) for _ in range(5)]
    call(*keep[0], 2)
    for out, x in keep * 2:
        call(out, x, 2)
        for pointers in fast_pointers(kernel)[-2:]:
            assert pointers[:2] == (out.data_ptr(), x.data_ptr())
    assert len(kernel.slow) == 2


def test_without_pytorchs_guards_calls_are_told_by_their_key(kernel, monkeypatch):
    monkeypatch.setattr(_replay, "_guards", None)
    call = op(kernel)
    for rows in (4, 5, 4, 5):
        call(torch.zeros(rows, 8), torch.zeros(rows, 8))
    assert (len(kernel.slow), len(kernel.fast)) == (2, 2)


def test_pytorchs_guards_are_used():
    assert _replay._guards is not None


def test_calls_of_several_kinds_in_turns(kernel):
    call = op(kernel)
    kinds = [
        (torch.zeros(4, 8), torch.zeros(4, 8)),
        (torch.zeros(4, 8), torch.zeros(4, 9)[:, :8]),
        (torch.zeros(4, 8), torch.zeros(4, 8), 2),
        (torch.zeros(5, 8), torch.zeros(5, 8)),
    ]
    for args in kinds:
        call(*args)
    for args in [*kinds, *kinds[::-1]]:
        call(*args)
        _, x, _, stride, _ = fast_pointers(kernel)[-1]
        assert (x, stride) == (args[1].data_ptr(), args[1].stride(0))
        assert kernel.fast[-1][0] == args[1].shape[0]
    assert len(kernel.slow) == 5


def test_several_launches_are_replayed_in_order(kernel):
    call = op(kernel)
    for _ in range(2):
        call(torch.zeros(4, 8), torch.zeros(4, 8), 3)
    assert (len(kernel.slow), len(kernel.fast)) == (3, 3)


def test_nothing_to_launch_is_remembered_too(kernel):
    calls = []
    call = op(kernel, calls=calls)
    for _ in range(2):
        call(torch.zeros(0, 8), torch.zeros(0, 8))
    assert len(calls) == 1
    assert not kernel.slow
    assert not kernel.fast


def test_gradients_go_the_long_way(kernel):
    calls = []
    call = op(kernel, calls=calls)
    x = torch.zeros(4, 8, requires_grad=True)
    call(torch.zeros(4, 8), x)
    with torch.enable_grad():
        call(torch.zeros(4, 8), x)
        assert len(calls) == 2
        call(torch.zeros(4, 8), torch.zeros(4, 8))
    call(torch.zeros(4, 8), x)
    assert len(calls) == 2


def test_bypass_and_launch_hooks_go_the_long_way(kernel):
    call = op(kernel)

    def again():
        slow = len(kernel.slow)
        call(torch.zeros(4, 8), torch.zeros(4, 8))
        return len(kernel.slow) > slow

    assert again()
    assert not again()
    with _replay.bypass(), _replay.bypass():
        assert again()
    assert not again()
    hooks = triton.knobs.runtime.launch_enter_hook
    hooks.add(print)
    try:
        assert again()
    finally:
        hooks.remove(print)
    assert not again()
    _replay.forget()
    assert again()


def test_a_full_cache_starts_anew(kernel, monkeypatch):
    monkeypatch.setattr(_replay, "_MOST_REPLAYS", 2)
    call = op(kernel)
    for rows in (1, 2, 3):
        call(torch.zeros(rows, 8), torch.zeros(rows, 8))
    call(torch.zeros(3, 8), torch.zeros(3, 8))
    assert (len(kernel.slow), len(kernel.fast)) == (3, 1)
    call(torch.zeros(1, 8), torch.zeros(1, 8))
    assert (len(kernel.slow), len(kernel.fast)) == (4, 1)


def run_twice(name, device, monkeypatch):
    """The second of two calls on different memory, and whether it was replayed."""
    op = getattr(torch.ops.echo, name).default
    op(*clones(examples(device)[name]))
    slow = []
    run = _launch._run
    monkeypatch.setattr(_launch, "_run", lambda *args: slow.append(args) or run(*args))
    args = clones(examples(device)[name])
    op(*args)
    monkeypatch.undo()
    return tensors(args), not slow


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_a_replay_equals_a_first_call(cuda, name, monkeypatch):
    have, is_replayed = run_twice(name, cuda, monkeypatch)
    assert is_replayed
    with _replay.bypass():
        want = clones(examples(cuda)[name])
        getattr(torch.ops.echo, name).default(*want)
    for left, right in zip(have, tensors(want), strict=True):
        assert torch.equal(left, right)


@pytest.mark.gpu
def test_replays_run_on_the_current_stream(cuda):
    x, weight = torch.ones(1 << 14, 4096, device=cuda), torch.ones(4096, device=cuda)
    echokernels.rms_norm(x, weight)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        x.mul_(0.0)  # a replay on another stream would overtake this
        y = echokernels.rms_norm(x, weight)
    side.synchronize()
    assert not y.any()


@pytest.mark.gpu
def test_threads_replay_side_by_side(cuda):
    weight = torch.ones(256, device=cuda)
    wrong = []

    def work(number):
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            for rows in [*range(1, 40)] * 4:
                x = torch.full((rows, 256), float(number), device=cuda)
                residual = torch.full_like(x, 1.0)
                echokernels.fused_add_rms_norm(x, residual, weight)
                if not bool((residual == number + 1.0).all()):
                    wrong.append((number, rows))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.gpu
def test_a_forced_tile_is_not_passed_over(cuda):
    x, weight = torch.randn(8, 256, device=cuda), torch.ones(256, device=cuda)
    want = echokernels.rms_norm(x, weight)
    grids = []
    run = _launch._run
    with pytest.MonkeyPatch.context() as patch, forced("rms_norm", TileConfig(2, 64, 1)):
        patch.setattr(
            _launch, "_run", lambda k, grid, *rest: grids.append(grid) or run(k, grid, *rest)
        )
        torch.testing.assert_close(echokernels.rms_norm(x, weight), want)
    assert grids == [(4,)]


@pytest.mark.gpu
def test_a_captured_replay_follows_its_inputs(cuda):
    x, weight = torch.randn(8, 256, device=cuda), torch.ones(256, device=cuda)
    echokernels.rms_norm(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = echokernels.rms_norm(x, weight)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(y, echokernels.rms_norm(x, weight))


@pytest.mark.gpu
@pytest.mark.multi_gpu
@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("name", NAMES)
def test_a20_replays_on_either_of_two_devices(name, monkeypatch):
    for current in (0, 1):
        with torch.cuda.device(current):
            for index in (0, 1):
                device = torch.device("cuda", index)
                have, is_replayed = run_twice(name, device, monkeypatch)
                assert is_replayed
                assert torch.cuda.current_device() == current
                want = clones(examples(device)[name])
                with _replay.bypass():
                    getattr(torch.ops.echo, name).default(*want)
                for left, right in zip(have, tensors(want), strict=True):
                    assert torch.equal(left, right)
