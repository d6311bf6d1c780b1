"""Formats of keys and values, of which `bench.kv_formats` measures the errors."""

import pytest
import torch

from bench import kv_formats as formats
from echokernels import dequantize_int8, quantize_int8


@pytest.fixture(scope="module")
def rows():
    return formats.outlier_channels(torch.Generator().manual_seed(1))[:, :64]


@pytest.mark.parametrize("name", formats.FORMATS)
def test_what_a_format_holds_it_gives_back(rows, name):
    for convert in formats.FORMATS[name]:
        once = convert(rows)
        assert torch.allclose(convert(once), once, rtol=2e-3, atol=0)
        assert not torch.equal(once, rows)


@pytest.mark.parametrize("convert", [formats.by_token, formats.by_channel, formats.by_tensor])
def test_a_code_is_off_by_half_a_step(rows, convert):
    dims = {formats.by_token: -1, formats.by_channel: 1, formats.by_tensor: (0, 1, 2)}[convert]
    step = rows.abs().amax(dims, keepdim=True) / 127
    off = (convert(rows) - rows).abs() / step
    assert 0.49 < off.max() <= 0.5 + 1e-9


def test_codes_by_token_are_those_of_the_op(rows):
    codes, scale = quantize_int8(rows.float())
    back = dequantize_int8(codes, scale, torch.float32)
    assert torch.allclose(back.double(), formats.by_token(rows.float().double()), rtol=1e-6)


def test_what_is_known_of_formats():
    """One scale suffers from loud tokens, a scale for each token from outlier channels."""
    of = {
        kind: {row.impl: row.rate for row in formats.errors(kind)}
        for kind in ("outlier channels", "loud tokens")
    }
    assert of["loud tokens"]["int8, one scale"] > 10 * of["loud tokens"]["int8"]
    assert of["outlier channels"]["int8"] > 3 * of["outlier channels"]["int8, keys by channel"]
    assert all(rates["bf16"] == min(rates.values()) for rates in of.values())
