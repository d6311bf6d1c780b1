"""silu_and_mul_quant against a float64 oracle."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echokernels._tuning import TileConfig, forced
from echokernels.activation import reference
from echokernels.activation.gated_quant import _config, silu_and_mul_quant
from tests.ops.quant_oracle import (
    CODE_DTYPES,
    assert_codes,
    assert_gap_is_untouched,
    strided_codes,
)
from tests.strategies import dtypes, generator, randn, seeds, strided_randn, token_counts

EACH_CODE = pytest.mark.parametrize("code", CODE_DTYPES)


def swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.cpu().double().chunk(2, -1)
    return gate / (1 + torch.exp(-gate)) * up


def input_giving(y: list[float], device: torch.device) -> torch.Tensor:
    """fp32 x of one row whose SwiGLU is exactly `y`: silu(32) is 32."""
    up = torch.tensor([y], device=device) / 32
    return torch.cat((torch.full_like(up, 32.0), up), dim=1)


@EACH_CODE
@given(
    tokens=token_counts,
    width=st.sampled_from([1, 7, 13, 96, 576, 1030]),
    dtype=dtypes,
    pad=st.sampled_from([0, 1, 16]),
    out_pad=st.sampled_from([0, 3, 16]),
    tile=st.sampled_from([None, TileConfig(1, 128, 1)]),  # the second loops over wider rows
    seed=seeds,
)
def test_silu_and_mul_quant(device, code, tokens, width, dtype, pad, out_pad, tile, seed):
    x = strided_randn(
        tokens, 2 * width, dtype=dtype, device=device, gen=generator(seed), pad=pad, scale=3.0
    )
    out, scale = strided_codes(tokens, width, dtype=code, device=device, pad=out_pad)
    with forced("silu_and_mul_quant", tile or _config(width)):
        silu_and_mul_quant(x, out=out, scale=scale)
    assert_codes(out, scale, swiglu(x))
    assert_gap_is_untouched(out, out_pad)


@EACH_CODE
@pytest.mark.parametrize("width", [14_336, 65_536 + 8])
def test_model_widths(device, code, width):
    x = randn(3, 2 * width, dtype=torch.bfloat16, device=device, gen=generator(width), scale=3.0)
    assert_codes(*silu_and_mul_quant(x, code), swiglu(x))


def test_a16_halves_round_to_even(device):
    y = [127, -127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.99, -0.99]
    codes, scale = silu_and_mul_quant(input_giving(y, device))
    assert scale.item() == 1.0
    assert codes.tolist() == [[127, -127, 0, 2, 2, 0, -2, -2, 1, -1]]


def test_a16_fp8_halves_round_to_even(device):
    # Quanta of 32 above 256, of 2 above 16; 464 would be halfway to the code beyond the largest;
    # subnormals are multiples of 2^-9.
    y = [448, -448, 272, 304, 17, 19, -17, 2.0**-10, 3 * 2.0**-10, 2.0**-9, 0.0]
    codes, scale = silu_and_mul_quant(input_giving(y, device), torch.float8_e4m3fn)
    assert scale.item() == 1.0
    want = [448, -448, 256, 320, 16, 20, -16, 0.0, 2 * 2.0**-9, 2.0**-9, 0.0]
    assert codes.float().tolist() == [want]


@EACH_CODE
@pytest.mark.parametrize("tokens", [1, 3])
def test_a17_zero_rows_and_masked_lanes(device, code, tokens):
    # 13 columns leave lanes of the tile empty. Row 1 of the three is zero.
    x = torch.cat([input_giving([5.0] * 13, device)] * tokens)
    x[1:2] = 0.0
    x[2:3, 13:] = torch.linspace(-1, 1, 13, device=device)
    codes, scale = silu_and_mul_quant(x, code)
    assert_codes(codes, scale, swiglu(x))
    assert (codes[0].float() == codes[0].float().max()).all()
    if tokens > 1:
        assert scale[1].item() == pytest.approx(1e-12)
        assert not codes[1].float().any()


@EACH_CODE
def test_a_row_that_is_not_finite_is_nan_as_a_whole(device, code):
    x = randn(6, 192, dtype=torch.float32, device=device, gen=generator(0))
    want_codes, want_scale = silu_and_mul_quant(x, code)
    bad = x.clone()
    bad[1, 7] = float("nan")
    bad[3, 100] = float("inf")
    bad[4, 5], bad[4, 101] = float("inf"), float("-inf")  # not the same column
    codes, scale = silu_and_mul_quant(bad, code)
    assert scale.isnan().tolist() == [False, True, False, True, True, False]
    assert not codes[[1, 3, 4]].float().any()
    good = [0, 2, 5]
    assert torch.equal(scale[good], want_scale[good])
    assert torch.equal(codes[good].float(), want_codes[good].float())


@EACH_CODE
def test_the_reference_honours_float64(code):
    x = randn(5, 14, dtype=torch.float64, device=torch.device("cpu"), gen=generator(0))
    out, scale = torch.empty(5, 7, dtype=code), torch.empty(5)
    reference.silu_and_mul_quant(out, scale, x)
    assert_codes(out, scale, swiglu(x))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [65_535, 65_536, 70_000])
def test_a22_more_rows_than_a_grid_dimension(cuda, tokens):
    x = torch.randn(tokens, 32, dtype=torch.bfloat16, device=cuda)
    codes, scale = silu_and_mul_quant(x)
    halves = [silu_and_mul_quant(part) for part in x.split(tokens // 2 + 1)]
    assert torch.equal(codes, torch.cat([half[0] for half in halves]))
    assert torch.equal(scale, torch.cat([half[1] for half in halves]))


@pytest.mark.gpu
def test_a01_more_than_2_31_elements(cuda):
    x = torch.randn(2**31 // 4096 + 2, 4096, dtype=torch.bfloat16, device=cuda)
    codes, scale = silu_and_mul_quant(x)
    want_codes, want_scale = silu_and_mul_quant(x[-2:].clone())
    assert torch.equal(codes[-2:], want_codes)
    assert torch.equal(scale[-2:], want_scale)


def bad_calls(device):
    x = torch.randn(4, 16, device=device)
    codes, scale = torch.empty(4, 8, dtype=torch.int8, device=device), torch.empty(4, device=device)
    yield ValueError, "x.shape is (4, 15), must have an even last", (x[:, :15], codes, scale)
    yield ValueError, "out.shape is (4, 7), must be (4, 8)", (x, codes[:, :7], scale)
    yield TypeError, "out.dtype is uint8, must be int8, float8_e4m3fn", (x, codes.byte(), scale)
    yield ValueError, "out.stride() is (1, 4), must be 1", (x, codes.T.contiguous().T, scale)
    yield ValueError, "scale.shape is (3,), must be (4)", (x, codes, scale[:3])
    yield TypeError, "scale.dtype is float16, must be float32", (x, codes, scale.half())


def test_bad_arguments(device):
    for error, message, (x, out, scale) in bad_calls(device):
        with pytest.raises(error) as caught:
            silu_and_mul_quant(x, out=out, scale=scale)
        assert message in str(caught.value)
    with pytest.raises(TypeError, match=r"out\.dtype is bfloat16, must be int8, float8_e4m3fn"):
        silu_and_mul_quant(torch.zeros(4, 16, device=device), torch.bfloat16)


@pytest.mark.parametrize("width", [1, 7, 1024, 14_336, 16_384, 65_536])
def test_config_covers_the_row_or_loops(width):
    config = _config(width)
    assert config.block_m == 1
    assert config.block_n >= min(width, 16_384)
