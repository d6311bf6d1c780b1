"""The page write compiles for every target."""

import pytest
import torch

from tests.aot.harness import (
    CODES,
    TARGETS,
    compile_op,
    global_accesses,
    local_memory,
    meta,
    meta_pages,
)


def compile_write(
    target, head_dim=128, dtype=torch.bfloat16, index=torch.int64, num_pages=64, tokens=5, code=None
):
    kv_heads = 8
    qkv = meta(tokens, (32 + 2 * kv_heads) * head_dim, dtype=dtype)
    kv = qkv[:, 32 * head_dim :].view(tokens, 2, kv_heads, head_dim)
    cache, scale = meta_pages(kv_heads, head_dim, code or dtype, num_pages)
    slots = meta(tokens, dtype=index)
    args = (kv[:, 0], kv[:, 1], cache, cache, slots, scale, scale)
    return compile_op("reshape_and_cache", target, *args)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_reshape_and_cache(target, head_dim):
    compile_write(target, head_dim)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_dtypes(target, dtype, index):
    compile_write(target, dtype=dtype, index=index)


@pytest.mark.parametrize(("code", "target"), CODES)
@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(64, torch.bfloat16), (80, torch.float32), (256, torch.float32)]
)
def test_quantised(code, target, head_dim, dtype):
    (kernel,) = compile_write(target, head_dim, dtype, code=code)
    if target.startswith("sm_"):
        assert local_memory(kernel) == 0


def test_fp8_is_refused_where_there_is_no_cast():
    with pytest.raises(ValueError, match=r"k_cache\.dtype is float8_e4m3fn, must be int8 on sm_80"):
        compile_write("sm_80", code=torch.float8_e4m3fn)


@pytest.mark.parametrize("target", TARGETS)
def test_a01_more_slots_than_an_int32_counts(target):
    compile_write(target, num_pages=2**28)


@pytest.mark.parametrize("target", TARGETS)
def test_hints_for_the_l2(target):
    compile_write(target, tokens=16_384)


@pytest.mark.parametrize("tokens", [5, 16_384])  # without and with hints for the L2
def test_loads_and_stores_are_16_bytes_wide(tokens):
    (kernel,) = compile_write("sm_90", tokens=tokens)
    assert sorted(global_accesses(kernel, wide=True)) == ["ld", "ld", "st", "st"]  # key and value
    assert global_accesses(kernel, wide=False) == ["ld"]  # the slot
