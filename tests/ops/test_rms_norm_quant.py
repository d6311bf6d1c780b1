"""rms_norm_quant against a float64 oracle."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echokernels._tuning import TileConfig, forced
from echokernels.norm import reference
from echokernels.norm._row import tile_of
from echokernels.norm.rms_norm import fused_add_rms_norm
from echokernels.norm.rms_norm_quant import WARP_ELEMENTS, rms_norm_quant
from tests.ops.quant_oracle import (
    CODE_DTYPES,
    assert_codes,
    assert_gap_is_untouched,
    strided_codes,
)
from tests.ops.test_rms_norm import streaming
from tests.strategies import dtypes, generator, randn, seeds, strided_randn, token_counts
from tests.tolerances import assert_close

# NumPy warns in the interpreter where a row is not finite, and of masked rows without an eps.
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning"),
]
EACH_CODE = pytest.mark.parametrize("code", CODE_DTYPES)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    x, weight = x.cpu().double(), weight.cpu().double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (weight + offset)


@EACH_CODE
@given(
    tokens=token_counts,
    heads=st.sampled_from([None, 1, 3]),
    width=st.sampled_from([1, 7, 13, 96, 576, 1030]),
    dtype=dtypes,
    has_residual=st.booleans(),
    pad=st.sampled_from([0, 1, 16]),
    offset=st.sampled_from([0.0, 1.0]),
    tile=st.sampled_from([None, TileConfig(2, 128, 1)]),  # the second loops over wider rows
    large=st.booleans(),
    seed=seeds,
)
def test_rms_norm_quant(
    device, code, tokens, heads, width, dtype, has_residual, pad, offset, tile, large, seed
):
    gen = generator(seed)
    shape = (tokens, width) if heads is None else (tokens, heads, width)
    x = strided_randn(*shape, dtype=dtype, device=device, gen=gen, pad=pad)
    residual = total = None
    if has_residual:
        residual = strided_randn(*shape, dtype=dtype, device=device, gen=gen, pad=2 * pad)
        total = x.double() + residual.double()
    before = x.clone()
    weight = randn(width, dtype=dtype, device=device, gen=gen)
    out, scale = strided_codes(*shape, dtype=code, device=device, pad=pad)
    with forced("rms_norm_quant", tile or tile_of(width, WARP_ELEMENTS)), streaming(large):
        rms_norm_quant(x, weight, 1e-6, residual, offset, out=out, scale=scale)
    assert_codes(out, scale, rms_norm(x if total is None else total, weight, 1e-6, offset))
    assert_gap_is_untouched(out, pad)
    assert torch.equal(x, before)
    if total is not None:
        assert_close(residual, total, scale=0.0)


@EACH_CODE
@pytest.mark.parametrize("width", [16_384, 20_480, 65_536 + 8])
def test_a13_wide_rows(device, code, width):
    gen = generator(width)
    x = randn(3, width, dtype=torch.bfloat16, device=device, gen=gen)
    residual = randn(3, width, dtype=torch.bfloat16, device=device, gen=gen)
    weight = randn(width, dtype=torch.bfloat16, device=device, gen=gen)
    total = x.double() + residual.double()
    codes, scale = rms_norm_quant(x, weight, residual=residual, dtype=code)
    assert_codes(codes, scale, rms_norm(total, weight, 1e-6, 0.0))
    assert_close(residual, total, scale=0.0)


def test_a11_the_residual_is_that_of_fused_add_rms_norm(device):
    gen = generator(11)
    x, residual = (randn(5, 96, dtype=torch.bfloat16, device=device, gen=gen) for _ in range(2))
    weight = randn(96, dtype=torch.bfloat16, device=device, gen=gen)
    want = residual.clone()
    fused_add_rms_norm(x.clone(), want, weight)
    rms_norm_quant(x, weight, residual=residual)
    assert torch.equal(residual, want)


def test_a16_halves_round_to_even(device):
    # Ones have the norm 1, so y is the weight; to the bit, for a mean over 16 is exact.
    y = [127, -127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.99, -0.99, 3.5, 0, 0, 0, 0, 0]
    x, weight = torch.ones(1, 16, device=device), torch.tensor(y, device=device)
    codes, scale = rms_norm_quant(x, weight, eps=0.0)
    assert scale.item() == 1.0
    assert codes.tolist() == [[127, -127, 0, 2, 2, 0, -2, -2, 1, -1, 4, 0, 0, 0, 0, 0]]


@EACH_CODE
@pytest.mark.parametrize("tokens", [1, 3])
def test_a17_zero_rows_and_masked_lanes(device, code, tokens):
    # 13 columns leave lanes of the tile empty. Row 1 of the three is zero.
    x = torch.full((tokens, 13), 5.0, device=device)
    x[1:2] = 0.0
    x[2:3] = torch.linspace(-1, 1, 13, device=device)
    weight = torch.full((13,), 3.0, device=device)
    codes, scale = rms_norm_quant(x, weight, dtype=code)
    assert_codes(codes, scale, rms_norm(x, weight, 1e-6, 0.0))
    assert (codes[0].float() == codes[0].float().max()).all()
    if tokens > 1:
        assert scale[1].item() == pytest.approx(1e-12)
        assert not codes[1].float().any()


@EACH_CODE
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_is_nan_as_a_whole(device, code, bad):
    x = randn(4, 96, dtype=torch.float32, device=device, gen=generator(0))
    weight = torch.ones(96, device=device)
    want_codes, want_scale = rms_norm_quant(x, weight, dtype=code)
    spoilt = x.clone()
    spoilt[1, 7] = bad
    codes, scale = rms_norm_quant(spoilt, weight, dtype=code)
    assert scale.isnan().tolist() == [False, True, False, False]
    assert not codes[1].float().any()
    good = [0, 2, 3]
    assert torch.equal(scale[good], want_scale[good])
    assert torch.equal(codes[good].float(), want_codes[good].float())


def test_the_reference_honours_float64():
    gen, cpu = generator(0), torch.device("cpu")
    x = randn(5, 14, dtype=torch.float64, device=cpu, gen=gen)
    weight = randn(14, dtype=torch.float64, device=cpu, gen=gen)
    out, scale = torch.empty(5, 14, dtype=torch.int8), torch.empty(5)
    reference.rms_norm_quant(out, scale, x, None, weight, 1e-6)
    assert_codes(out, scale, rms_norm(x, weight, 1e-6, 0.0))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [65_535, 65_536, 70_000])
def test_a22_more_rows_than_a_grid_dimension(cuda, tokens):
    x = torch.randn(tokens, 2048, dtype=torch.bfloat16, device=cuda)  # one row a program
    weight = torch.randn(2048, dtype=torch.bfloat16, device=cuda)
    codes, scale = rms_norm_quant(x, weight)
    halves = [rms_norm_quant(part, weight) for part in x.split(tokens // 2 + 1)]
    assert torch.equal(codes, torch.cat([half[0] for half in halves]))
    assert torch.equal(scale, torch.cat([half[1] for half in halves]))


@pytest.mark.gpu
def test_a01_more_than_2_31_elements(cuda):
    x = torch.randn(2**31 // 4096 + 2, 4096, dtype=torch.bfloat16, device=cuda)
    weight = torch.randn(4096, dtype=torch.bfloat16, device=cuda)
    codes, scale = rms_norm_quant(x, weight)
    want_codes, want_scale = rms_norm_quant(x[-2:].clone(), weight)
    assert torch.equal(codes[-2:], want_codes)
    assert torch.equal(scale[-2:], want_scale)


def bad_calls(device):
    x, weight = torch.randn(4, 8, device=device), torch.ones(8, device=device)
    good = {"x": x, "weight": weight}
    codes = torch.empty(4, 8, dtype=torch.int8, device=device)
    yield ValueError, "weight.shape is (7,), must be (8)", good | {"weight": weight[:7]}
    yield ValueError, "eps is -1.0, must be at least 0.0", good | {"eps": -1.0}
    yield ValueError, "residual.shape is (3, 8), must be (4, 8)", good | {"residual": x[:3]}
    yield TypeError, "residual.dtype is float16, must be float32", good | {"residual": x.half()}
    yield ValueError, "out.shape is (4, 7), must be (4, 8)", good | {"out": codes[:, :7]}
    yield TypeError, "out.dtype is float32, must be int8, float8_e4m3fn", good | {"out": x}
    yield (
        TypeError,
        "out.dtype is uint8, must be int8, float8_e4m3fn",
        good | {"dtype": torch.uint8},
    )
    yield ValueError, "scale.shape is (4, 1), must be (4)", good | {"scale": x[:, :1]}
    yield ValueError, "scale.shape is (4,), must be (4, 1)", {
        "x": x[:, None], "weight": weight, "scale": x[:, 0],
    }  # fmt: skip


def test_bad_arguments(device):
    for error, message, arguments in bad_calls(device):
        with pytest.raises(error) as caught:
            rms_norm_quant(**arguments)
        assert message in str(caught.value)
