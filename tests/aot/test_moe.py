"""The ops of experts compile for every target."""

import pytest
import torch
import triton

from echokernels._path import forced_path
from echokernels._tuning import forced
from echokernels.moe._hopper_gemm import HopperTile
from echokernels.moe.grouped_gemm import launch_grouped_gemm
from tests.aot.harness import (
    TARGETS,
    compile_launch,
    compile_op,
    global_accesses,
    local_memory,
    meta,
    product_loop,
    spills_in_loops,
)

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


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    # rows of all experts, of which there are 128 or 8; width; K
    ("dtype", "rows", "experts", "width", "depth", "activation"),
    [
        (BF16, 8, 128, 768, 2048, "silu"),
        (BF16, 512, 128, 2048, 768, "none"),
        (FP16, 8192, 8, 14_336, 4096, "gelu"),
        (FP32, 64, 8, 96, 40, "gelu_tanh"),
    ],
)
def test_grouped_gemm(target, dtype, rows, experts, width, depth, activation):
    size = width if activation == "none" else 2 * width
    x, out = meta(rows, depth, dtype=dtype), meta(rows, width, dtype=dtype)
    weight, offsets = meta(experts, size, depth, dtype=dtype), meta(experts + 1, dtype=INT)
    weights = meta(rows, dtype=FP32) if activation == "none" else None
    with forced_path("portable"):
        (kernel,) = compile_op("grouped_gemm", target, out, x, weight, offsets, weights, activation)
    if target != "gfx942":
        assert not spills_in_loops(kernel)


@pytest.mark.parametrize("reads", ["in order", "weights early", "gathers"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("dtype", "width", "depth", "activation", "experts", "block_n"),
    [
        (BF16, 768, 2048, "silu", 128, 256),
        (FP16, 2048, 768, "none", 128, 256),
        (FP16, 14_336, 4096, "gelu", 8, 256),
        (BF16, 33, 40, "gelu_tanh", 8, 256),
        (BF16, 768, 2048, "silu", 512, 128),
        (BF16, 40, 24, "none", 8, 128),
        (BF16, 2, 8, "none", 1, 256),
    ],
)
def test_grouped_gemm_of_many_rows(
    reads, weighted, dtype, width, depth, activation, experts, block_n
):
    rows, tokens, gathers = 32_768, 4096, reads == "gathers"
    size = width if activation == "none" else 2 * width
    choices = meta(rows, dtype=INT) if gathers else None
    x = meta(tokens if gathers else rows, depth, dtype=dtype)
    out = meta(rows, triton.cdiv(width, 8) * 8, dtype=dtype)[:, :width]
    args = (
        out, x, meta(experts, size, depth, dtype=dtype), meta(experts + 1, dtype=INT),
        meta(rows, dtype=FP32) if weighted else None, activation, choices, 8,
        reads == "weights early",
    )  # fmt: skip
    tile = HopperTile(128, block_n, num_stages=4)
    with forced_path("hopper"), forced("grouped_gemm_hopper", tile):
        (kernel,) = compile_launch(launch_grouped_gemm, "sm_90", *args)
    assert kernel.name == "grouped_gemm_hopper_kernel"
    assert local_memory(kernel) == 0
    # TMA stores 16 bytes at least, so what is beside an odd width would be overwritten.
    assert ("global.shared::cta" in kernel.asm["ptx"]) == (width % 8 == 0)
    loop = product_loop(kernel)
    products = [line for line in loop if "HGMMA" in line]
    # All columns of a tile at once, and no wait between the products of a stage.
    assert len(products) == 4
    assert all(f"64x{block_n}x16" in line for line in products)
    assert sum("DEPBAR" in line for line in loop) == 1


def test_tiles_are_smaller_where_large_ones_take_one_turn():
    def columns(rows):
        x, weight = meta(rows, 14_336), meta(8, 4096, 14_336)
        args = (meta(rows, 4096), x, weight, meta(9, dtype=INT), None, "none")
        (kernel,) = compile_op("grouped_gemm", "sm_90", *args)
        assert local_memory(kernel) == 0
        (columns,) = {line.split("64x")[1][:3] for line in product_loop(kernel) if "HGMMA" in line}
        return columns

    assert columns(1024) == "128"
    assert columns(2048) == "256"


def test_many_rows_run_the_kernel_for_them():
    def kernel_of(rows, depth):
        x, weight = meta(rows, depth), meta(8, 64, depth)
        args = (meta(rows, 64), x, weight, meta(9, dtype=INT), None, "none")
        (kernel,) = compile_op("grouped_gemm", "sm_90", *args)
        return kernel.name

    assert kernel_of(32, 64) == "grouped_gemm_hopper_kernel"
    assert kernel_of(31, 64) == "_grouped_gemm_kernel"
    assert kernel_of(32, 60) == "_grouped_gemm_kernel"  # rows of 120 bytes: not for TMA


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("tokens", "launches"), [(1, 2), (16, 4), (4096, 5)])
def test_fused_moe(target, tokens, launches):
    x, weights, ids = meta(tokens, 256), meta(tokens, 8, dtype=FP32), meta(tokens, 8, dtype=INT)
    w1, w2 = meta(128, 2 * 96, 256), meta(128, 256, 96)
    kernels = compile_op("fused_moe", target, x, x, w1, w2, weights, ids, "silu", 0, None)
    assert len(kernels) == launches


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("dtype", "tokens", "k", "experts", "hidden", "width"),
    [(BF16, 1, 8, 128, 2048, 768), (FP16, 1, 2, 8, 4096, 14_336), (FP32, 2, 4, 60, 40, 96)],
)
def test_few_choices(target, dtype, tokens, k, experts, hidden, width):
    x, weights = meta(tokens, hidden, dtype=dtype), meta(tokens, k, dtype=FP32)
    w1 = meta(experts, 2 * width, hidden, dtype=dtype)
    w2 = meta(experts, hidden, width, dtype=dtype)
    ids = meta(tokens, k, dtype=INT)
    kernels = compile_op("fused_moe", target, x, x, w1, w2, weights, ids, "silu", 0, None)
    assert len(kernels) == 2
    if target == "gfx942":
        return
    assert all(local_memory(kernel) == 0 for kernel in kernels)
    # Weights are on their way while others are multiplied.
    if dtype != FP32:
        assert all("cp.async.cg" in kernel.asm["ptx"] for kernel in kernels)
