"""The projections with fused epilogues compile for every target, and work in registers."""

import pytest
import torch

from tests.aot.harness import CODES, TARGETS, compile_op, local_memory, meta, meta_pages

# Tiles of 16, 64 and 128 tokens.
TOKENS = pytest.mark.parametrize("tokens", [1, 64, 500])
EACH_TARGET = pytest.mark.parametrize("target", TARGETS)


def assert_in_registers(kernels, target):
    for kernel in kernels:
        if target.startswith("sm_"):
            # On sm_100 ptxas parks an address of the epilogue during the loop.
            allowed = 32 if target == "sm_100" else 0
            assert local_memory(kernel) <= allowed, f"{kernel.name}: {local_memory(kernel)} B"


def gate_up_args(tokens, k, width, *, dtype=torch.bfloat16, bias=False, activation="silu"):
    out, x, weight = (
        meta(*shape, dtype=dtype) for shape in ((tokens, width), (tokens, k), (2 * width, k))
    )
    return out, x, weight, meta(2 * width, dtype=dtype) if bias else None, activation


def qkv_args(
    tokens, k, heads, *, head_dim=128, rotary_dim=128, dtype=torch.bfloat16, normed=False,
    bias=False, is_neox=True, paged=True, index=torch.int64, code=None,
):  # fmt: skip
    num_heads, num_kv_heads = heads
    rows = (num_heads + 2 * num_kv_heads) * head_dim
    norm = meta(head_dim, dtype=dtype) if normed else None
    cache, scale = meta_pages(num_kv_heads, head_dim, code or dtype) if paged else (None, None)
    return (
        meta(tokens, rows, dtype=dtype), meta(tokens, k, dtype=dtype), meta(rows, k, dtype=dtype),
        meta(rows, dtype=dtype) if bias else None, meta(tokens, dtype=index),
        meta(4096, rotary_dim, dtype=torch.float32), norm, norm, 1e-6, num_heads, num_kv_heads,
        head_dim, is_neox, cache, cache, meta(tokens, dtype=index) if paged else None, scale, scale,
    )  # fmt: skip


@EACH_TARGET
@TOKENS
@pytest.mark.parametrize(("k", "width"), [(4096, 14_336), (8192, 3584)])
def test_fused_gate_up(target, tokens, k, width):
    assert_in_registers(
        compile_op("fused_gate_up", target, *gate_up_args(tokens, k, width)), target
    )


@EACH_TARGET
@TOKENS
@pytest.mark.parametrize(
    "variant",
    [
        {"dtype": torch.float16, "bias": True, "activation": "gelu_tanh"},
        {"dtype": torch.float32, "activation": "gelu"},
    ],
    ids=["fp16-bias", "fp32"],
)
def test_fused_gate_up_variants(target, tokens, variant):
    # Neither width fills its last tile.
    args = gate_up_args(tokens, 1040, 1552, **variant)
    assert_in_registers(compile_op("fused_gate_up", target, *args), target)


@EACH_TARGET
@TOKENS
@pytest.mark.parametrize(
    ("k", "heads", "normed"),
    [(4096, (32, 8), False), (1024, (16, 8), True), (8192, (8, 1), False)],
    ids=["llama-8b", "qwen3-0.6b", "70b-tp8"],
)
def test_fused_qkv_rope(target, tokens, k, heads, normed):
    args = qkv_args(tokens, k, heads, normed=normed)
    assert_in_registers(compile_op("fused_qkv_rope", target, *args), target)


@EACH_TARGET
@TOKENS
@pytest.mark.parametrize(
    "variant",
    [
        {"dtype": torch.float16, "bias": True, "is_neox": False, "head_dim": 80, "rotary_dim": 32},
        {"dtype": torch.float32, "normed": True, "head_dim": 64, "rotary_dim": 64},
        {"normed": True, "head_dim": 256, "rotary_dim": 256, "paged": False, "index": torch.int32},
    ],
    ids=["fp16-partial-neighbours", "fp32", "wide-heads"],
)
def test_fused_qkv_rope_variants(target, tokens, variant):
    args = qkv_args(tokens, 1040, (4, 2), **variant)
    assert_in_registers(compile_op("fused_qkv_rope", target, *args), target)


@TOKENS
@pytest.mark.parametrize(("code", "target"), CODES)
def test_fused_qkv_rope_quantised(code, target, tokens):
    args = qkv_args(tokens, 1024, (16, 8), normed=True, code=code)
    assert_in_registers(compile_op("fused_qkv_rope", target, *args), target)


@pytest.mark.parametrize(("code", "target"), CODES)
def test_fused_qkv_rope_quantised_neighbours(code, target):
    args = qkv_args(33, 1040, (4, 2), head_dim=80, rotary_dim=32, is_neox=False, code=code)
    assert_in_registers(compile_op("fused_qkv_rope", target, *args), target)


def test_fp8_is_refused_where_there_is_no_cast():
    args = qkv_args(1, 1024, (16, 8), code=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"k_cache\.dtype is float8_e4m3fn, must be int8 on sm_80"):
        compile_op("fused_qkv_rope", "sm_80", *args)


@EACH_TARGET
def test_unaligned_rows_compile(target):
    # Loads of single elements, for which registers do not suffice: right, but slow.
    compile_op("fused_gate_up", target, *gate_up_args(1, 1001, 77))


@TOKENS
def test_stores_are_vectors(tokens):
    kernels = [
        *compile_op("fused_gate_up", "sm_90", *gate_up_args(tokens, 4096, 14_336)),
        *compile_op("fused_qkv_rope", "sm_90", *qkv_args(tokens, 4096, (32, 8))),
    ]
    for kernel in kernels:
        assert "st.global.v" in kernel.asm["ptx"]
        assert "st.global.b16" not in kernel.asm["ptx"]
