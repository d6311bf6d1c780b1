"""What every op promises whatever it computes: devices, tracing, gradients, launches, tiles."""

import os
import subprocess
import sys

import pytest
import torch

from echokernels import _gluon_compat, _launch, _library
from echokernels._library import OPS
from echokernels._target import KNOWN_TARGETS, assume, target_of
from echokernels._tuning import TileConfig, calibrate, forced, select
from tests.ops.examples import examples

NAMES = sorted(OPS)


def run(name, args):
    """Calls the op and returns all its tensors, mutated ones included."""
    getattr(torch.ops.echo, name)(*args)
    return [arg for arg in args if isinstance(arg, torch.Tensor)]


def test_there_is_an_example_of_every_op(device):
    assert sorted(examples(device)) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(device, name):
    torch.library.opcheck(getattr(torch.ops.echo, name).default, examples(device)[name])


@pytest.mark.parametrize("name", NAMES)
def test_only_what_the_schema_says_is_mutated(device, name):
    args = examples(device)[name]
    before = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
    getattr(torch.ops.echo, name)(*args)
    schema = getattr(torch.ops.echo, name).default._schema
    changed = 0
    for argument, old, new in zip(schema.arguments, before, args, strict=True):
        if isinstance(new, torch.Tensor):
            same = torch.equal(old, new)
            written = argument.alias_info is not None and argument.alias_info.is_write
            assert same or written, f"{argument.name} changed"
            changed += not same
    assert changed, "nothing was written"


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_refused(device, name):
    args = list(examples(device)[name])
    schema = getattr(torch.ops.echo, name).default._schema
    for at, argument in enumerate(schema.arguments):
        if isinstance(args[at], torch.Tensor) and args[at].is_floating_point():
            with torch.enable_grad():
                bad = [*args[:at], args[at].clone().requires_grad_(), *args[at + 1 :]]
                message = rf"{name}: {argument.name}\.requires_grad is True, must be False"
                with pytest.raises(ValueError, match=message):
                    getattr(torch.ops.echo, name)(*bad)
    # Without gradients in force the same tensors are welcome.
    run(name, [a.requires_grad_() if torch.is_tensor(a) and a.is_leaf and a.is_floating_point()
               else a for a in examples(device)[name]])  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_tensors_on_two_devices_are_refused(cuda, name):
    on_cpu, on_gpu = examples(torch.device("cpu"))[name], examples(cuda)[name]
    for at, arg in enumerate(on_gpu):
        if isinstance(arg, torch.Tensor):
            with pytest.raises(
                ValueError, match=r"device is (cpu|cuda:0), must be (cpu|cuda:0) as"
            ):
                getattr(torch.ops.echo, name)(*on_gpu[:at], on_cpu[at], *on_gpu[at + 1 :])


@pytest.mark.gpu
@pytest.mark.multi_gpu
@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("name", NAMES)
def test_a20_a_device_that_is_not_current(name):
    first = run(name, examples(torch.device("cuda:0"))[name])
    second = run(name, examples(torch.device("cuda:1"))[name])
    assert torch.cuda.current_device() == 0
    for left, right in zip(first, second, strict=True):
        assert right.device.index == 1
        assert torch.equal(left.cpu(), right.cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_a_captured_call_equals_an_eager_one(cuda, name):
    want = run(name, examples(cuda)[name])
    args = examples(cuda)[name]
    fresh = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        getattr(torch.ops.echo, name)(*args)
    for arg, value in zip(args, fresh, strict=True):
        if isinstance(arg, torch.Tensor):
            arg.copy_(value)
    graph.replay()
    for have, wanted in zip([a for a in args if torch.is_tensor(a)], want, strict=True):
        assert torch.equal(have, wanted)


def test_a_call_is_an_nvtx_range(monkeypatch):
    events = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", events.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: events.append("end"))

    def fails():
        raise KeyError

    _library._in_range("echo::first", lambda: events.append("runs"))()
    with pytest.raises(KeyError):
        _library._in_range("echo::second", fails)()
    assert events == ["echo::first", "runs", "end", "echo::second", "end"]


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
def test_nvtx_ranges_on_request():
    code = """
import torch, echokernels
seen = []
torch.cuda.nvtx.range_push = seen.append
torch.cuda.nvtx.range_pop = lambda: None
x = torch.ones(2, 64, device="cuda")
for _ in range(2):
    echokernels.silu_and_mul(x)
assert seen == ["echo::silu_and_mul"] * 2, seen
"""
    environment = os.environ | {"ECHOKERNELS_NVTX": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_an_empty_grid_launches_nothing():
    _launch.launch(None, (0,), torch.zeros(1))


def test_a_grid_beyond_the_hardware_is_refused():
    with pytest.raises(
        ValueError, match=r"the launch grid is \(2147483648,\), each dimension must"
    ):
        _launch.launch(None, (2**31,), torch.zeros(1))
    with pytest.raises(ValueError, match=r"the launch grid is \(1, 65536\), each dimension must"):
        _launch.launch(None, (1, 65_536), torch.zeros(1))


def test_forced_over_calibrated_over_heuristic():
    heuristic, measured, explicit = TileConfig(1, 1), TileConfig(2, 2), TileConfig(3, 3)

    def choice():
        return select("an op of this test", 64, lambda: heuristic)

    assert choice() is heuristic
    calibrate("an op of this test", 64, measured)
    assert choice() is measured
    assert select("an op of this test", 65, lambda: heuristic) is heuristic
    with forced("an op of this test", explicit):
        assert choice() is explicit
        with forced("another", heuristic):
            assert choice() is explicit
    assert choice() is measured


def test_a_target_can_be_assumed(device):
    with assume(KNOWN_TARGETS["gfx942"]):
        assert target_of(device).backend == "hip"
    assert target_of(device).backend == "cuda"


def test_gluon_has_a_barrier_under_one_name():
    assert callable(_gluon_compat.barrier)
