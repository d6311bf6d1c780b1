"""The gated activations compile for every target."""

import pytest
import torch

from tests.aot.harness import TARGETS, compile_op, meta


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("op", ["silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"])
def test_gated(target, op):
    compile_op(op, target, meta(5, 1536), meta(5, 3072))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    "width", [1, 7, 28_672]
)  # many rows a program, not a vector, many tiles a row
def test_silu_and_mul(target, dtype, width):
    compile_op("silu_and_mul", target, meta(5, width, dtype=dtype), meta(5, 2 * width, dtype=dtype))


def test_loads_and_stores_are_16_bytes_wide():
    (kernel,) = compile_op("silu_and_mul", "sm_90", meta(5, 1536), meta(5, 3072))
    assert kernel.asm["ptx"].count("ld.global.v4.b32") == 2  # gate, up
    assert kernel.asm["ptx"].count("st.global.v4.b32") == 1
