"""The ops of experts compile for every target."""

import pytest
import torch

from tests.aot.harness import TARGETS, compile_op, global_accesses, local_memory, meta

INT = torch.int32
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


def outputs(tokens, k, id_dtype=INT):
    return meta(tokens, k, dtype=FP32), meta(tokens, k, dtype=id_dtype)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("dtype", "tokens", "experts", "k"),
    [(BF16, 64, 128, 8), (FP16, 1, 8, 2), (FP32, 4096, 128, 8), (FP32, 5, 512, 16)],
)
def test_topk_softmax(target, dtype, tokens, experts, k):
    logits = meta(tokens, experts, dtype=dtype)
    (kernel,) = compile_op("topk_softmax", target, *outputs(tokens, k), logits, True)
    if target != "gfx942":
        assert local_memory(kernel) == 0


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("id_dtype", "bias", "sigmoid"),
    [(INT, meta(256, dtype=FP32), True), (torch.int64, None, False)],
)
def test_grouped_topk(target, id_dtype, bias, sigmoid):
    logits = meta(64, 256)
    compile_op(
        "grouped_topk", target, *outputs(64, 8, id_dtype), logits, bias, 8, 4, sigmoid, True, 2.5
    )


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("id_dtype", "tokens", "experts", "launches"),
    [(INT, 1, 128, 1), (torch.int64, 64, 8, 1), (INT, 4096, 128, 2), (torch.int64, 65, 512, 2)],
)
def test_moe_align(target, id_dtype, tokens, experts, launches):
    ids = meta(tokens, 8, dtype=id_dtype)
    index = (meta(70_000, dtype=INT), meta(5000, dtype=INT), meta(1, dtype=INT))
    kernels = compile_op("moe_align", target, *index, ids, experts, 16)
    assert len(kernels) == launches


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("dtype", "tokens", "launches"), [(BF16, 3, 2), (FP16, 4096, 3), (FP32, 65, 3)]
)
def test_moe_permute(target, dtype, tokens, launches):
    x, permuted = meta(tokens, 2048, dtype=dtype), meta(tokens * 8, 2048, dtype=dtype)
    ids, rows = meta(tokens, 8, dtype=torch.int64), meta(tokens, 8, dtype=INT)
    kernels = compile_op(
        "moe_permute", target, permuted, meta(129, dtype=INT), rows, x, ids, 128, 128
    )
    assert len(kernels) == launches
    weights = meta(tokens, 8, dtype=FP32)
    compile_op("moe_unpermute", target, x, permuted, rows, weights)


def test_rows_move_16_bytes_at_a_time():
    x, permuted = meta(64, 2048), meta(512, 2048)
    ids = meta(64, 8, dtype=INT)
    *_, copy = compile_op("moe_permute", "sm_90", permuted, meta(129, dtype=INT), ids, x, ids, 128)
    (join,) = compile_op("moe_unpermute", "sm_90", x, permuted, ids, meta(64, 8, dtype=FP32))
    assert {*global_accesses(copy, wide=True)} == {"ld", "st"}
    assert {*global_accesses(copy, wide=False)} == {"ld"}  # rows
    assert {*global_accesses(join, wide=True)} == {"ld", "st"}
