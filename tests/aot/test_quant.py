"""The ops with quantised output compile for every target that has a cast to their codes."""

import pytest
import torch

from tests.aot.harness import CODES, TARGETS, compile_op, global_accesses, local_memory, meta


def codes_and_scale(tokens, width, code):
    return meta(tokens, width, dtype=code), meta(tokens, dtype=torch.float32)


@pytest.mark.parametrize(("code", "target"), CODES)
@pytest.mark.parametrize("width", [64, 4096, 20_480])  # several rows a program, one row, looped
def test_rms_norm_quant(code, target, width):
    x = meta(5, width)
    compile_op("rms_norm_quant", target, *codes_and_scale(5, width, code), x, x, meta(width), 1e-6)


@pytest.mark.parametrize(("code", "target"), CODES)
@pytest.mark.parametrize("width", [7, 14_336, 65_536])  # not a vector, one tile a row, looped
def test_silu_and_mul_quant(code, target, width):
    compile_op("silu_and_mul_quant", target, *codes_and_scale(5, width, code), meta(5, 2 * width))


@pytest.mark.parametrize("code", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("rows", [5, 16_384])  # without and with hints for the L2
def test_rows_stay_in_registers(code, rows):
    outputs = codes_and_scale(rows, 8192, code)
    x = meta(rows, 8192)
    (norm,) = compile_op("rms_norm_quant", "sm_90", *outputs, x, x, meta(8192), 1e-6)
    (swiglu,) = compile_op(
        "silu_and_mul_quant", "sm_90", *codes_and_scale(rows, 14_336, code), meta(rows, 28_672)
    )
    assert local_memory(norm) == local_memory(swiglu) == 0


@pytest.mark.parametrize("op", ["rms_norm_quant", "silu_and_mul_quant"])
def test_fp8_is_refused_where_there_is_no_cast(op):
    outputs = codes_and_scale(5, 64, torch.float8_e4m3fn)
    x = meta(5, 64)
    inputs = (x, None, meta(64), 1e-6) if op == "rms_norm_quant" else (meta(5, 128),)
    with pytest.raises(ValueError, match=r"out\.dtype is float8_e4m3fn, must be int8 on sm_80"):
        compile_op(op, "sm_80", *outputs, *inputs)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("dtype", "width"),  # not a vector, several rows, looped
    [(torch.float16, 7), (torch.bfloat16, 128), (torch.float32, 20_480)],
)
def test_int8_kv(target, dtype, width):
    x, q = meta(5, 8, width, dtype=dtype), meta(5, 8, width, dtype=torch.int8)
    scale = meta(8, 5, dtype=torch.float32).T
    compile_op("quantize_int8", target, q, scale, x)
    compile_op("dequantize_int8", target, x, q, scale)


@pytest.mark.parametrize("rows", [5, 1_000_000])  # without and with hints for the L2
def test_int8_kv_heads_are_vectors_in_registers(rows):
    x, q, scale = (
        meta(rows, 128),
        meta(rows, 128, dtype=torch.int8),
        meta(rows, dtype=torch.float32),
    )
    (quantize,) = compile_op("quantize_int8", "sm_90", q, scale, x)
    (dequantize,) = compile_op("dequantize_int8", "sm_90", x, q, scale)
    assert {*global_accesses(quantize, wide=True)} == {"ld", "st"}
    assert global_accesses(quantize, wide=False) == ["st"]  # scales
    assert {*global_accesses(dequantize, wide=True)} == {"ld", "st"}
    assert local_memory(quantize) == local_memory(dequantize) == 0
