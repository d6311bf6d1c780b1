"""A Gluon kernel with a TMA descriptor is replayed: the descriptor moves to the new tensor."""

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from echokernels import _launch, _replay
from echokernels._dispatch import cached_call

ROWS, COLUMNS = 64, 64


@gluon.jit
def _copy_tile_kernel(
    out_ptr,  # [ROWS, COLUMNS]
    x_desc,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
):
    tile = gl.allocate_shared_memory(x_desc.dtype, [ROWS, COLUMNS], x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    mbarrier.expect(ready, ROWS * COLUMNS * 2)
    tma.async_copy_global_to_shared(x_desc, [0, 0], ready, tile)
    mbarrier.wait(ready, 0)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))[None, :]
    gl.store(out_ptr + row * COLUMNS + column, tile.load(layout))


def _copy_tile(out, x):
    block = [ROWS, COLUMNS]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    descriptor = TensorDescriptor.from_tensor(x, block, layout)
    _launch.launch(_copy_tile_kernel, (1,), out, descriptor, ROWS, COLUMNS, num_warps=4)


@pytest.mark.gpu
def test_a_descriptor_follows_its_tensor(cuda, monkeypatch):
    if torch.cuda.get_device_capability(cuda)[0] != 9:
        pytest.skip("TMA of this test needs sm_90")
    schema = "copy_tile(Tensor(a!) out, Tensor x) -> ()"
    copy = cached_call(schema, _copy_tile, _replay.new_cache())
    slow = []
    run = _launch._run
    monkeypatch.setattr(_launch, "_run", lambda *args: slow.append(args) or run(*args))
    keep = []
    for _ in range(4):
        x = torch.randn(ROWS, COLUMNS, device=cuda).bfloat16()
        out = torch.full_like(x, float("nan"))
        copy(out, x)
        assert torch.equal(out, x)
        keep.append((out, x))  # so that each call has memory of its own
    for out, x in keep:  # and at addresses that were seen before
        copy(out, x.add_(1))
        assert torch.equal(out, x)
    assert len(slow) == 1
