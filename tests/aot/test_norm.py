"""The norms compile for every target."""

import pytest
import torch

from tests.aot.harness import TARGETS, compile_op, meta


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("width", [64, 4096, 20_480])  # several rows a program, one row, looped
def test_rms_norm(target, width):
    compile_op("rms_norm", target, meta(5, width), meta(5, width), meta(width), 1e-6)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [4096, 20_480])
def test_fused_add_rms_norm(target, dtype, width):
    x = meta(5, width, dtype=dtype)
    compile_op("fused_add_rms_norm", target, x, x, meta(width, dtype=dtype), 1e-6)
