"""The norms compile for every target."""

import pytest
import torch

from tests.aot.harness import TARGETS, compile_op, global_accesses, local_memory, meta


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("rows", "width"),
    [(5, 64), (5, 4096), (16_384, 4096), (5, 20_480)],  # several rows a program, one, read twice
)
def test_rms_norm(target, rows, width):
    compile_op("rms_norm", target, meta(rows, width), meta(rows, width), meta(width), 1e-6)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [4096, 20_480])
def test_fused_add_rms_norm(target, dtype, width):
    x = meta(5, width, dtype=dtype)
    compile_op("fused_add_rms_norm", target, x, x, meta(width, dtype=dtype), 1e-6)


@pytest.mark.parametrize("rows", [5, 16_384])
@pytest.mark.parametrize("width", [4096, 8192])
def test_accesses_are_16_bytes_wide(rows, width):
    x = meta(rows, width)
    (kernel,) = compile_op("fused_add_rms_norm", "sm_90", x, x, meta(width), 1e-6)
    assert {*global_accesses(kernel, wide=True)} == {"ld", "st"}
    assert global_accesses(kernel, wide=False) == []
    assert local_memory(kernel) == 0


def test_launches_early_from_hopper_on():
    for target, early in (("sm_80", False), ("sm_90", True), ("sm_100", True)):
        (kernel,) = compile_op("rms_norm", target, meta(5, 64), meta(5, 64), meta(64), 1e-6)
        assert kernel.metadata.launch_pdl == early
        assert ("griddepcontrol.wait" in kernel.asm["ptx"]) == early
        assert ("griddepcontrol.launch_dependents" in kernel.asm["ptx"]) == early
