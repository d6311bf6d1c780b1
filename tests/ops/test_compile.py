"""Every op under torch.compile: one graph, no break, the same results, one compilation for all
token counts."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from echokernels._library import OPS
from tests.ops.examples import examples

NAMES = sorted(OPS)


def clones(args):
    """Fresh memory with the strides of `args`, and views of one tensor still views of one."""
    memo = {}

    def clone(arg):
        base = arg._base if arg._base is not None else arg
        if id(base) not in memo:
            memo[id(base)] = base.clone()
        return memo[id(base)].as_strided(arg.shape, arg.stride(), arg.storage_offset())

    return [clone(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]


def tensors(args):
    return [arg for arg in args if isinstance(arg, torch.Tensor)]


@pytest.mark.parametrize("name", NAMES)
def test_one_compilation_serves_all_token_counts(device, name):
    op = getattr(torch.ops.echo, name).default

    def call(args):
        op(*args)
        return tensors(args)

    torch._dynamo.reset()
    backend = CompileCounterWithBackend("inductor" if device.type == "cuda" else "aot_eager")
    compiled = torch.compile(call, backend=backend, fullgraph=True, dynamic=True)
    compilations = []
    for tokens in (5, 7, 8, 16, 33):
        args = examples(device, tokens)[name]
        want = clones(args)
        op(*want)
        for have, wanted in zip(compiled(clones(args)), tensors(want), strict=True):
            assert torch.equal(have, wanted)
        compilations.append(backend.frame_count)
    # The first call may compile twice: Dynamo starts anew once it knows what a float is used for.
    assert compilations[0] >= 1
    assert set(compilations) == {compilations[0]}
