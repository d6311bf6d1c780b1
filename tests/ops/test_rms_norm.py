"""rms_norm and fused_add_rms_norm against a float64 oracle."""

from contextlib import ExitStack
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import echokernels
from echokernels import _l2
from echokernels._replay import bypass
from echokernels._target import INTERPRETED
from echokernels.norm import _row
from tests.strategies import (
    dtypes,
    generator,
    poisoned,
    randn,
    seeds,
    strided_randn,
    token_counts,
)
from tests.tolerances import assert_close

# 1 and 7: less than a vector; 576: SmolLM2; 1,030: just over a tile of the multi-row path; 20,480:
# looped.
WIDTHS = [1, 7, 64, 96, 576, 1030]


def streaming(wanted: bool):
    """Within the context, calls of any size take the path of large ones, if that is wanted."""
    stack = ExitStack()
    if wanted:
        stack.enter_context(mock.patch.object(_l2, "STREAMED_BYTES", 0))
        stack.enter_context(bypass())
    return stack


def oracle(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    x, weight = x.double().cpu(), weight.double().cpu()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (weight + offset)


@given(
    tokens=token_counts,
    heads=st.sampled_from([None, 1, 3]),
    width=st.sampled_from(WIDTHS),
    dtype=dtypes,
    pad=st.sampled_from([0, 1, 16]),
    offset=st.sampled_from([0.0, 1.0]),
    large=st.booleans(),
    seed=seeds,
)
def test_rms_norm(device, tokens, heads, width, dtype, pad, offset, large, seed):
    gen = generator(seed)
    shape = (tokens, width) if heads is None else (tokens, heads, width)
    x = strided_randn(*shape, dtype=dtype, device=device, gen=gen, pad=pad)
    weight = randn(width, dtype=dtype, device=device, gen=gen)
    out = poisoned(*shape, dtype=dtype, device=device)
    with streaming(large):
        torch.ops.echo.rms_norm(out, x, weight, 1e-6, offset)
    assert_close(out, oracle(x, weight, 1e-6, offset))


@given(
    tokens=token_counts,
    width=st.sampled_from(WIDTHS),
    dtype=dtypes,
    pad=st.sampled_from([0, 1, 16]),
    offset=st.sampled_from([0.0, 1.0]),
    large=st.booleans(),
    seed=seeds,
)
def test_fused_add_rms_norm(device, tokens, width, dtype, pad, offset, large, seed):
    gen = generator(seed)
    x = strided_randn(tokens, width, dtype=dtype, device=device, gen=gen, pad=pad)
    residual = strided_randn(tokens, width, dtype=dtype, device=device, gen=gen, pad=pad)
    weight = randn(width, dtype=dtype, device=device, gen=gen)
    total = x.double() + residual.double()
    with streaming(large):
        echokernels.fused_add_rms_norm(x, residual, weight, 1e-6, offset)
    assert_close(x, oracle(total, weight, 1e-6, offset))
    assert_close(residual, total, scale=0.0)
    if pad and tokens:
        # The gap between the rows still holds the poison.
        assert x.as_strided((tokens, width + pad), (width + pad, 1))[:, width:].isnan().all()


@pytest.mark.skipif(
    INTERPRETED, reason="the interpreter truncates to bf16; this test wants exact bits"
)
def test_a11_sum_is_not_rounded_before_the_variance(device):
    x = torch.tensor([[256.0] + [1.0] * 7], dtype=torch.bfloat16, device=device)
    ulps = torch.tensor([[2.0**9, 1, 1, 1, 3, 3, 5, 7]], device=device)
    residual = (ulps * 2.0**-9).bfloat16()
    total = (x.float() + residual.float()).bfloat16()
    weight = torch.ones(8, dtype=torch.bfloat16, device=device)
    echokernels.fused_add_rms_norm(x, residual, weight, 1e-6)
    want = [2.828125] + [0.01104736] * 5 + [0.01110840, 0.01116943]
    assert torch.equal(x.cpu(), torch.tensor([want]).bfloat16())
    assert torch.equal(residual, total)


def test_a12_last_dimension_must_be_contiguous(device):
    x = torch.randn(64, 32, device=device).T
    with pytest.raises(ValueError, match=r"x\.stride\(\) is \(1, 32\), must be 1 in the last"):
        echokernels.rms_norm(x, torch.ones(64, device=device))


@pytest.mark.parametrize("width", [16_384, 20_480, 65_536 + 8])
def test_a13_wide_rows(device, width):
    gen = generator(width)
    x = randn(3, width, dtype=torch.bfloat16, device=device, gen=gen)
    residual = randn(3, width, dtype=torch.bfloat16, device=device, gen=gen)
    weight = randn(width, dtype=torch.bfloat16, device=device, gen=gen)
    total = x.double() + residual.double()
    echokernels.fused_add_rms_norm(x, residual, weight)
    assert_close(x, oracle(total, weight, 1e-6, 0.0))
    assert_close(residual, total, scale=0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [65_535, 65_536, 70_000])
def test_a22_more_rows_than_a_grid_dimension(cuda, tokens):
    x = torch.randn(tokens, 16, device=cuda)
    weight = torch.randn(16, device=cuda)
    halves = [echokernels.rms_norm(part, weight) for part in x.split(tokens // 2 + 1)]
    assert torch.equal(echokernels.rms_norm(x, weight), torch.cat(halves))


@pytest.mark.parametrize("width", [96, 4096])
def test_streaming_changes_no_bit(device, width):
    gen = generator(width)
    x, residual, weight = (
        randn(*shape, dtype=torch.bfloat16, device=device, gen=gen)
        for shape in ((5, width), (5, width), (width,))
    )
    results = []
    for wanted in (False, True):
        with streaming(wanted):
            results.append(echokernels.fused_add_rms_norm(x.clone(), residual.clone(), weight))
            results.append((echokernels.rms_norm(x, weight), None))
    assert torch.equal(results[0][0], results[2][0])
    assert torch.equal(results[0][1], results[2][1])
    assert torch.equal(results[1][0], results[3][0])


@pytest.mark.gpu
def test_a01_more_than_2_31_elements(cuda):
    x = torch.randn(2**31 // 4096 + 2, 4096, dtype=torch.bfloat16, device=cuda)
    weight = torch.randn(4096, dtype=torch.bfloat16, device=cuda)
    out = echokernels.rms_norm(x, weight, out=x.clone())
    assert torch.equal(out[-2:], echokernels.rms_norm(x[-2:].clone(), weight))


@pytest.mark.gpu
def test_a_chain_of_early_launches_waits_for_its_inputs(cuda):
    # 64 kernels of a few microseconds: each is set up while the one before it, which writes its
    # inputs, is under way.
    gen = generator(0)
    start = [randn(200, 4096, dtype=torch.bfloat16, device=cuda, gen=gen) for _ in range(2)]
    weights = [randn(4096, dtype=torch.bfloat16, device=cuda, gen=gen) for _ in range(64)]
    want = [tensor.clone() for tensor in start]
    for weight in weights:
        echokernels.fused_add_rms_norm(*want, weight)
        torch.cuda.synchronize()
    got = [tensor.clone() for tensor in start]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            echokernels.fused_add_rms_norm(*got, weight)
    for tensor, value in zip(got, start, strict=True):
        tensor.copy_(value)
    graph.replay()
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))


def test_in_place(device):
    x = torch.randn(5, 96, device=device)
    want = echokernels.rms_norm(x, torch.ones(96, device=device))
    assert torch.equal(echokernels.rms_norm(x, torch.ones(96, device=device), out=x), want)


def test_the_input_of_the_plain_norm_survives(device):
    # Backends that norm in place lose the residual stream that the caller still needs (Liger#376).
    x = torch.randn(5, 96, device=device)
    before = x.clone()
    echokernels.rms_norm(x, torch.ones(96, device=device))
    assert torch.equal(x, before)


def bad_calls(device):
    x, weight = torch.randn(4, 8, device=device), torch.ones(8, device=device)
    yield ValueError, "weight.shape is (7,), must be (8)", (x, torch.ones(7, device=device))
    yield ValueError, "x has shape (8,), must have 2 or 3 dimensions", (x[0], weight)
    yield TypeError, "x.dtype is float64, must be float16, bfloat16, float32", (x.double(), weight)
    yield ValueError, "eps is -1.0, must be at least 0.0", (x, weight, -1.0)
    yield ValueError, "eps is nan, must be at least 0.0", (x, weight, float("nan"))
    yield ValueError, "must have a last dimension of at least 1", (x[:, :0], weight[:0])


def test_bad_arguments(device):
    for error, message, args in bad_calls(device):
        with pytest.raises(error) as caught:
            echokernels.rms_norm(*args)
        assert message in str(caught.value)


def test_tiles_cover_the_row_or_loop():
    for width in (1, 64, 576, 4096, 16_384):
        tile = _row.tile_of(width, 512)
        assert tile.block_n >= width
        assert tile.block_m * tile.block_n >= 2048
    assert _row.tile_of(65_536, 512).block_n == 16_384


@pytest.mark.parametrize(
    ("width", "rows", "warps"),
    [(1, 2048, 4), (128, 16, 4), (2048, 1, 4), (4096, 1, 8), (5120, 1, 8), (8192, 1, 16)],
)
def test_warps_follow_the_width(width, rows, warps):
    tile = _row.tile_of(width, 512)
    assert (tile.block_m, tile.num_warps) == (rows, warps)
