"""quantize_int8 and dequantize_int8 against float64, to the bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echokernels._library import OPS
from echokernels._tuning import TileConfig, forced
from echokernels.quant import reference
from echokernels.quant.int8_kv import _config, dequantize_int8, fold, quantize_int8
from tests.ops.quant_oracle import (
    assert_exact_codes,
    assert_gap_is_untouched,
    assert_same_values,
    strided_codes,
    uneven_rows,
)
from tests.ops.quantised_cache import CODES_OF_HALVES, HALVES, NOT_FINITE, rows_of_a17
from tests.strategies import FLOAT_DTYPES, dtypes, generator, poisoned, randn, seeds
from tests.tolerances import assert_close

pytestmark = NOT_FINITE

# No leading dimension is one row; four that no stride joins take several launches.
leading = st.sampled_from([(), (0,), (1,), (33,), (3, 0), (5, 3), (2, 3, 5), (3, 2, 3, 2)])
widths = st.sampled_from([0, 1, 7, 13, 64, 96, 128, 301])
tiles = st.sampled_from([None, TileConfig(2, 64, 1)])  # the second loops over wider rows


def shuffled(x: torch.Tensor, gen: torch.Generator, pad: int) -> torch.Tensor:
    """`x` with its leading dimensions in another order in memory, and `pad` NaN between rows."""
    order = torch.randperm(x.dim() - 1, generator=gen).tolist()
    shape = [x.shape[i] for i in order]
    wide = poisoned(*shape, x.shape[-1] + pad, dtype=x.dtype, device=x.device)
    inverse = [order.index(i) for i in range(len(order))]
    view = wide[..., : x.shape[-1]].permute(*inverse, -1)
    view.copy_(x)
    return view


@given(
    lead=leading,
    width=widths,
    dtype=dtypes,
    pad=st.sampled_from([0, 1, 16]),
    tile=tiles,
    seed=seeds,
)
def test_a23_quantize_int8(device, lead, width, dtype, pad, tile, seed):
    gen = generator(seed)
    x = uneven_rows(*lead, width, dtype=dtype, device=device, gen=gen)
    x = shuffled(x, gen, pad)
    q, scale = strided_codes(*lead, width, dtype=torch.int8, device=device, pad=pad)
    with forced("quantize_int8", tile or _config(width)):
        assert quantize_int8(x, q, scale) == (q, scale)
    assert_exact_codes(q, scale, x)
    assert_gap_is_untouched(q, pad)
    have = quantize_int8(x)
    assert_same_values(have[0], q)
    assert_same_values(have[1], scale)


@given(
    lead=leading,
    width=widths,
    dtype=dtypes,
    pad=st.sampled_from([0, 1, 16]),
    tile=tiles,
    seed=seeds,
)
def test_a23_dequantize_int8(device, lead, width, dtype, pad, tile, seed):
    gen = generator(seed)
    q = torch.randint(-128, 128, (*lead, width), generator=gen).char().to(device)
    q = shuffled(q, gen, pad)
    scale = randn(*lead, 3, dtype=torch.float32, device=device, gen=gen)[..., 1]
    if scale.dim() and len(scale):
        scale[-1] = float("nan")
    wide = poisoned(*lead, width + pad, dtype=dtype, device=device)
    out = wide[..., :width]
    with forced("dequantize_int8", tile or _config(width)):
        assert dequantize_int8(q, scale, out=out) is out
    assert_close(out, q.double() * scale.double()[..., None], scale=0.0)
    assert wide[..., width:].isnan().all()
    assert_same_values(dequantize_int8(q, scale, dtype), out)


@given(lead=leading, width=widths, dtype=dtypes, seed=seeds)
def test_a_round_trip_is_within_half_a_scale(device, lead, width, dtype, seed):
    x = randn(*lead, width, dtype=dtype, device=device, gen=generator(seed), scale=3.0)
    q, scale = quantize_int8(x)
    back = dequantize_int8(q, scale, torch.float32)
    error = (back.double() - x.double()).abs()
    # The scale and the product are rounded to fp32, the latter at up to 127 of the scale.
    assert (error <= scale.double()[..., None] / 2 * (1 + 512 * 2.0**-24)).all()


@pytest.mark.parametrize("width", [16_384, 20_480, 65_536 + 8])
def test_a13_wide_rows(device, width):
    x = randn(3, width, dtype=torch.bfloat16, device=device, gen=generator(width))
    q, scale = quantize_int8(x)
    assert_exact_codes(q, scale, x)
    assert_close(dequantize_int8(q, scale), q.double() * scale.double()[:, None], scale=0.0)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_a16_halves_round_to_even(device, dtype):
    # 0.99 is another number in bf16 and fp16, but not another code.
    q, scale = quantize_int8(torch.tensor([HALVES], dtype=dtype, device=device))
    assert scale.item() == 1.0
    assert q.tolist() == [CODES_OF_HALVES]


@pytest.mark.parametrize("only", [None, 0, 1, 2])
def test_a17_zero_rows_and_masked_lanes(device, only):
    x = rows_of_a17(device)
    x = x if only is None else x[only : only + 1]
    q, scale = quantize_int8(x)
    assert_exact_codes(q, scale, x)
    back = dequantize_int8(q, scale, torch.float32)
    for row in range(len(x)):
        if not x[row].any():
            assert not q[row].any()
            assert scale[row].item() == pytest.approx(1e-12)
            assert not back[row].any()
    assert not back.isnan().any()


def test_masked_lanes_are_neither_read_nor_written(device):
    # Around these 3 rows of 13 columns lies as much as a program has lanes, poisoned.
    def inside(dtype):
        wide = poisoned(400, 40, dtype=dtype, device=device)
        return wide, wide[200:203, 5:18]

    wide_x, x = inside(torch.float32)
    x.copy_(rows_of_a17(device))
    wide_q, q = inside(torch.int8)
    wide_scale, scale = inside(torch.float32)
    wide_out, out = inside(torch.float32)
    scale = scale[:, 0]
    quantize_int8(x, q, scale)
    assert_exact_codes(q, scale, x)
    dequantize_int8(q, scale, out=out)
    for wide, view in ((wide_x, x), (wide_q, q), (wide_scale, scale), (wide_out, out)):
        view.fill_(wide[0, 0])
        assert_same_values(wide, wide[:1, :1].expand_as(wide))


def test_a_row_that_is_not_finite_comes_back_as_nan(device):
    x = randn(4, 96, dtype=torch.float32, device=device, gen=generator(0))
    x[1, 7], x[2, 95] = float("nan"), float("-inf")
    q, scale = quantize_int8(x)
    assert not q[1:3].any()
    back = dequantize_int8(q, scale)
    assert back.isnan().all(-1).tolist() == [False, True, True, False]
    assert back[[0, 3]].isfinite().all()


def test_the_references_honour_float64():
    x = randn(5, 14, dtype=torch.float64, device=torch.device("cpu"), gen=generator(0)).float()
    q, scale = torch.empty(5, 14, dtype=torch.int8), torch.empty(5, dtype=torch.float64)
    reference.quantize_int8(q, scale, x.double())
    assert_same_values(scale, x.double().abs().amax(-1) / 127)
    out = torch.empty(5, 14, dtype=torch.float64)
    reference.dequantize_int8(out, q, scale)
    assert_same_values(out, q.double() * scale[:, None])


def test_dimensions_that_one_stride_joins_are_one():
    x = torch.empty(2, 3, 1, 5, 8)
    assert fold((x, x[..., 0].contiguous()), 4) == [(30, (8, 1))]
    assert fold((x, x.transpose(0, 1).contiguous().transpose(0, 1)), 4) == [
        (2, (120, 40)), (3, (40, 80)), (5, (8, 8)),
    ]  # fmt: skip
    assert fold((x[:1, :1, :, :1],), 4) == []
    assert fold((x[0, 0, 0, 0],), 0) == []


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [65_535, 65_536, 70_000])
def test_a22_more_rows_than_a_grid_dimension(cuda, tokens):
    x = torch.randn(tokens, 2048, dtype=torch.bfloat16, device=cuda)  # one row a program
    q, scale = quantize_int8(x)
    halves = [quantize_int8(part) for part in x.split(tokens // 2 + 1)]
    assert torch.equal(q, torch.cat([half[0] for half in halves]))
    assert torch.equal(scale, torch.cat([half[1] for half in halves]))
    back = dequantize_int8(q, scale)
    assert torch.equal(back[-2:], dequantize_int8(q[-2:], scale[-2:]))


@pytest.mark.gpu
def test_a01_more_than_2_31_elements(cuda):
    x = torch.randn(2**31 // 4096 + 2, 4096, dtype=torch.bfloat16, device=cuda)
    q, scale = quantize_int8(x)
    want_q, want_scale = quantize_int8(x[-2:].clone())
    assert torch.equal(q[-2:], want_q)
    assert torch.equal(scale[-2:], want_scale)
    back = dequantize_int8(q, scale, out=x)
    assert torch.equal(back[-2:], dequantize_int8(want_q, want_scale))


def bad_quantizations(x, q, scale):
    yield ValueError, "x.shape is (), must have at least 1 dim", (x[0, 0], q[0, 0], scale[0])
    yield TypeError, "x.dtype is float64, must be float16", (x.double(), q, scale)
    yield ValueError, "x.stride() is (1, 4), must be 1", (x.T.contiguous().T, q, scale)
    yield ValueError, "q.shape is (4, 7), must be (4, 8)", (x, q[:, :7], scale)
    yield TypeError, "q.dtype is uint8, must be int8", (x, q.byte(), scale)
    yield ValueError, "q.stride() is (1, 4), must be 1", (x, q.T.contiguous().T, scale)
    yield ValueError, "scale.shape is (4, 1), must be (4)", (x, q, scale[:, None])
    yield TypeError, "scale.dtype is float16, must be float32", (x, q, scale.half())


def bad_dequantizations(x, q, scale):
    yield ValueError, "q.shape is (), must have at least 1 dim", (x[0, 0], q[0, 0], scale[0])
    yield TypeError, "q.dtype is uint8, must be int8", (x, q.byte(), scale)
    yield ValueError, "q.stride() is (1, 4), must be 1", (x, q.T.contiguous().T, scale)
    yield ValueError, "out.shape is (4, 7), must be (4, 8)", (x[:, :7], q, scale)
    yield TypeError, "out.dtype is float64, must be float16", (x.double(), q, scale)
    yield ValueError, "out.stride() is (1, 4), must be 1", (x.T.contiguous().T, q, scale)
    yield ValueError, "scale.shape is (3,), must be (4)", (x, q, scale[:3])
    yield TypeError, "scale.dtype is float16, must be float32", (x, q, scale.half())


def test_a12_bad_arguments(device):
    x, scale = torch.randn(4, 8, device=device), torch.ones(4, device=device)
    q = torch.zeros(4, 8, dtype=torch.int8, device=device)
    for error, message, (bad_x, bad_q, bad_scale) in bad_quantizations(x, q, scale):
        with pytest.raises(error) as caught:
            quantize_int8(bad_x, bad_q, bad_scale)
        assert message in str(caught.value)
    for error, message, (out, bad_q, bad_scale) in bad_dequantizations(x, q, scale):
        with pytest.raises(error) as caught:
            dequantize_int8(bad_q, bad_scale, out=out)
        assert message in str(caught.value)


def test_a20_mixed_devices_are_refused():
    x, q, scale = torch.zeros(2, 4), torch.zeros(2, 4, dtype=torch.int8), torch.zeros(2)
    with pytest.raises(ValueError, match=r"scale\.device is meta, must be cpu as x's is"):
        OPS["quantize_int8"].check(q, scale.to("meta"), x)
    with pytest.raises(ValueError, match=r"out\.device is meta, must be cpu as q's is"):
        OPS["dequantize_int8"].check(x.to("meta"), q, scale)


@pytest.mark.parametrize("width", [0, 1, 7, 128, 1024, 16_384, 65_536])
def test_config_covers_the_row_or_loops(width):
    config = _config(width)
    assert config.block_n >= min(width, 16_384)
    assert config.block_m * config.block_n <= max(2048, config.block_n)
