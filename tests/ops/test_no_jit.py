"""no_jit: within it a kernel that would have to be compiled raises."""

import threading

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from echokernels import _launch, no_jit
from echokernels._library import OPS
from echokernels._target import INTERPRETED, KNOWN_TARGETS, assume
from tests.ops.examples import examples

knobs = triton.knobs.runtime
REFUSED = "a kernel would be compiled within no_jit.*call warmup.*first: kernel\\[4 warps\\]"


def compile_something():
    """What Triton calls before it compiles."""
    if knobs.jit_cache_hook is not None:
        knobs.jit_cache_hook(key="", repr="kernel[4 warps]", fn=None, compile={},
                             is_manual_warmup=False, already_compiled=False)  # fmt: skip


def test_it_holds_until_the_outermost_context_ends():
    compile_something()
    with no_jit():
        with no_jit(), pytest.raises(RuntimeError, match=REFUSED):
            compile_something()
        with pytest.raises(RuntimeError, match=REFUSED):
            compile_something()
    compile_something()


def test_it_holds_in_other_threads_and_after_an_error():
    raised = []

    def work():
        try:
            compile_something()
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    with no_jit():
        thread.start()
        thread.join()
    assert len(raised) == 1
    with pytest.raises(KeyError), no_jit():
        raise KeyError
    compile_something()


def test_the_hook_of_someone_else_comes_back(monkeypatch):
    calls = []
    hook = lambda **kwargs: calls.append(kwargs["repr"])  # noqa: E731
    monkeypatch.setattr(knobs, "jit_cache_hook", hook)
    with no_jit():
        assert knobs.jit_cache_hook is not hook
    assert knobs.jit_cache_hook is hook


class H100:
    """As much of a driver as Triton asks before it compiles."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, _device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


@pytest.mark.skipif(INTERPRETED, reason="interpreted kernels are not compiled")
@pytest.mark.parametrize("op", OPS)
def test_kernels_of_every_op_are_refused(op, monkeypatch):
    # Triton describes kernels to hooks in JSON, which does not know every constant.
    def prepare(kernel, grid, args, options):
        kernel.warmup(*args, grid=grid, **options)

    monkeypatch.setattr(driver, "_active", H100())
    monkeypatch.setattr(_launch, "_run", prepare)
    args = examples(torch.device("cpu"))[op]
    with assume(KNOWN_TARGETS["sm_90"]), no_jit(), pytest.raises(RuntimeError, match="in no_jit"):
        OPS[op].triton(*args)


@triton.jit
def _store_kernel(out_ptr, VALUE: tl.constexpr):
    tl.store(out_ptr, VALUE)


@pytest.mark.gpu
def test_a_kernel_is_compiled_before_or_not_at_all(cuda):
    out = torch.zeros(1, device=cuda)
    with no_jit(), pytest.raises(RuntimeError, match="_store_kernel"):
        _launch.launch(_store_kernel, (1,), out, VALUE=3.0)
    assert out.item() == 0.0
    _launch.launch(_store_kernel, (1,), out, VALUE=3.0)
    out.zero_()
    with no_jit():
        _launch.launch(_store_kernel, (1,), out, VALUE=3.0)
    assert out.item() == 3.0
