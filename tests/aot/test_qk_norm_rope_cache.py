"""QK-norm, RoPE and page write in one kernel: compiles for every target."""

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

PAIRINGS = pytest.mark.parametrize("is_neox", [True, False])


def compile_fused(
    target,
    is_neox=True,
    dims=(128, 128),
    heads=(32, 8),
    dtype=torch.bfloat16,
    index=torch.int64,
    norms="qk",
    has_caches=True,
    tokens=5,
    code=None,
):
    (head_dim, rotary_dim), (num_heads, num_kv_heads) = dims, heads
    qkv = meta(tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    weights = [meta(head_dim, dtype=dtype) if name in norms else None for name in "qk"]
    table = meta(4096, rotary_dim, dtype=torch.float32)
    cache, scale = meta_pages(num_kv_heads, head_dim, code or dtype)
    pages = (cache, cache, meta(tokens, dtype=index)) if has_caches else (None, None, None)
    return compile_op(
        "fused_qk_norm_rope_cache", target, qkv, meta(tokens, dtype=index), table, *weights, 1e-6,
        num_heads, num_kv_heads, head_dim, is_neox, *pages, scale, scale,
    )  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
@PAIRINGS
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (80, 32), (256, 64), (7, 6)])
def test_fused_qk_norm_rope_cache(target, is_neox, dims):
    compile_fused(target, is_neox, dims)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_dtypes(target, dtype, index):
    compile_fused(target, dtype=dtype, index=index)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("norms", ["qk", "q", ""])
@pytest.mark.parametrize("has_caches", [True, False])
def test_parts(target, norms, has_caches):
    compile_fused(target, norms=norms, has_caches=has_caches)


@pytest.mark.parametrize(("code", "target"), CODES)
@PAIRINGS
@pytest.mark.parametrize("dims", [(128, 128), (7, 6)])
def test_quantised(code, target, is_neox, dims):
    compile_fused(target, is_neox, dims, code=code)


@PAIRINGS
@pytest.mark.parametrize("code", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("heads", [(32, 8), (16, 8), (8, 1)])
def test_quantised_heads_stay_in_registers(is_neox, code, heads):
    (kernel,) = compile_fused("sm_90", is_neox, heads=heads, code=code)
    assert local_memory(kernel) == 0


def test_fp8_is_refused_where_there_is_no_cast():
    with pytest.raises(ValueError, match=r"k_cache\.dtype is float8_e4m3fn, must be int8 on sm_80"):
        compile_fused("sm_80", code=torch.float8_e4m3fn)


@pytest.mark.parametrize("target", TARGETS)
@PAIRINGS
def test_hints_for_the_l2(target, is_neox):
    compile_fused(target, is_neox, tokens=16_384)


@PAIRINGS
@pytest.mark.parametrize("heads", [(32, 8), (16, 8), (64, 8), (8, 1), (40, 40)])
@pytest.mark.parametrize("tokens", [5, 16_384])  # without and with hints for the L2
def test_no_thread_asks_another(is_neox, heads, tokens):
    """All loads and stores are 16 bytes wide, and table, weights and heads are in one layout."""
    (kernel,) = compile_fused("sm_90", is_neox, heads=heads, tokens=tokens)
    assert {*global_accesses(kernel, wide=True)} == {"ld", "st"}
    assert global_accesses(kernel, wide=False) == ["ld", "ld"]  # the position, the slot
    assert kernel.metadata.shared == 0
    assert local_memory(kernel) == 0
