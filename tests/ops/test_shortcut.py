"""The library's functions go past PyTorch's dispatcher only where it would end at a replay.

On the CPU with an op of the test's own, whose replays are noted.
"""

from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from echokernels import _replay
from echokernels._dispatch import cached_call, shortcut
from echokernels._replay import Known, bypass

SCHEMA = "copy(Tensor(a!) out, Tensor x, Tensor? extra=None, int times=1) -> ()"


class Copy:
    """An op whose kernel does nothing, and what its calls came to."""

    def __init__(self, library):
        self.replayed, self.dispatched, self.launched = [], 0, 0
        cache = _replay.new_cache()
        library.define(SCHEMA)
        library.impl("copy", cached_call(SCHEMA, self.launch, cache), "CPU")
        torch.library.register_fake("echo_shortcut::copy", lambda *_: None, lib=library)
        self.op = torch.ops.echo_shortcut.copy.default
        self.call = shortcut(SCHEMA, self.dispatch, cache)
        self.through_op = shortcut(SCHEMA, self.op, cache)

    def launch(self, *_):
        self.launched += 1

    def dispatch(self, *args):
        self.dispatched += 1
        self.op(*args)


@pytest.fixture
def copy(monkeypatch):
    library = torch.library.Library("echo_shortcut", "FRAGMENT")
    copy = Copy(library)

    def remember(cache, key, _recording, tensors):
        cache[key] = Known(key[0], _replay._matcher(tensors), lambda *p: copy.replayed.append(p))

    monkeypatch.setattr(_replay, "remember", remember)
    yield copy
    library._destroy()


def pair(*shape):
    return torch.zeros(shape or (4, 8)), torch.zeros(shape or (4, 8))


def warm(copy):
    """The second call of a kind is the one that is found again without its key."""
    for _ in range(2):
        copy.call(*pair())
    assert (copy.dispatched, copy.launched, len(copy.replayed)) == (2, 1, 1)


def test_a_call_like_the_last_goes_past_the_dispatcher(copy):
    warm(copy)
    out, x = pair()
    copy.call(out, x)
    assert copy.dispatched == 2
    assert copy.replayed[-1] == (out.data_ptr(), x.data_ptr(), 0)


def test_so_do_keywords(copy):
    warm(copy)
    out, x = pair()
    copy.call(x=x, out=out, times=1)
    assert copy.dispatched == 2
    assert copy.replayed[-1] == (out.data_ptr(), x.data_ptr(), 0)


@pytest.mark.parametrize(
    "other",
    [
        pair(5, 8),
        (torch.zeros(4, 8), torch.zeros(4, 9)[:, :8]),
        (torch.zeros(4, 8), torch.zeros(4, 8, dtype=torch.int32)),
        (torch.zeros(4, 8), torch.zeros(33)[1:].view(4, 8)),
        (*pair(), torch.zeros(3)),
        (*pair(), None, 2),
        (torch.zeros(4, 8), torch.nn.Parameter(torch.zeros(4, 8), requires_grad=False)),
    ],
    ids=["shape", "stride", "dtype", "alignment", "present", "scalar", "subclass"],
)
def test_other_calls_are_dispatched(copy, other):
    warm(copy)
    copy.call(*other)
    assert copy.dispatched == 3


def test_an_absent_tensor_that_was_present_is_dispatched(copy):
    for _ in range(2):
        copy.call(*pair(), torch.zeros(3))
    copy.call(*pair(), None)
    assert copy.dispatched == 3


def test_calls_are_dispatched_where_replays_are_bypassed(copy):
    warm(copy)
    with bypass():
        copy.call(*pair())
    assert (copy.dispatched, copy.launched) == (3, 2)


def test_inference_mode_has_replays_of_its_own(copy):
    warm(copy)
    with torch.inference_mode():
        for _ in range(3):
            copy.call(*pair())
    assert copy.dispatched == 3


@pytest.mark.parametrize("enabled", [True, False])
def test_gradients_are_dispatched_for(copy, enabled):
    warm(copy)
    with torch.set_grad_enabled(enabled):
        copy.call(torch.zeros(4, 8), torch.zeros(4, 8).requires_grad_())
    assert copy.dispatched == 3  # without gradients the guards find other keys


class Functions(TorchFunctionMode):
    def __torch_function__(self, function, _types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, function, _types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("watch", "dispatched"),
    [
        (nullcontext, 2),
        (torch.no_grad, 2),
        (Functions, 3),
        (Dispatches, 3),
        (lambda: profile(activities=[ProfilerActivity.CPU]), 3),
    ],
    ids=["nothing", "no_grad", "functions", "dispatches", "profiler"],
)
def test_who_watches_sees_the_op(copy, watch, dispatched):
    warm(copy)
    out, x = pair()
    with watch():
        copy.call(out, x)
    assert copy.dispatched == dispatched


def test_fake_tensors_are_dispatched(copy):
    warm(copy)
    with FakeTensorMode():
        out, x = pair()
        copy.call(out, x)
    copy.call(out, x)
    assert copy.dispatched == 4


def test_a_traced_graph_contains_the_op(copy):
    warm(copy)
    graph = make_fx(lambda out, x: copy.through_op(out, x))(*pair())
    assert copy.op in [node.target for node in graph.graph.nodes]


def test_a_compiled_graph_contains_the_op(copy):
    warm(copy)
    seen = []

    def backend(graph, _inputs):
        seen.extend(node.target for node in graph.graph.nodes)
        return graph.forward

    def call(out, x):
        copy.through_op(out, x)
        return x + 1

    torch.compile(call, backend=backend, fullgraph=True)(*pair())
    assert copy.op in seen


def test_a_transform_is_dispatched_for(copy):
    warm(copy)
    with pytest.raises(RuntimeError):
        torch.vmap(copy.call)(torch.zeros(2, 4, 8), torch.zeros(2, 4, 8))
    assert copy.dispatched == 3
