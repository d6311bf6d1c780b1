"""silu_and_mul, gelu_and_mul and gelu_tanh_and_mul against float64 oracles."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echokernels._library import OPS
from echokernels.activation import reference
from echokernels.activation.gated import _config, gelu_and_mul, gelu_tanh_and_mul, silu_and_mul
from tests.strategies import (
    FLOAT_DTYPES,
    dtypes,
    generator,
    poisoned,
    randn,
    seeds,
    strided_randn,
    token_counts,
)
from tests.tolerances import assert_close

# NumPy warns in the interpreter: exp and squares do overflow, to the right limit of the quotient.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

# 1 and 7: less than a vector; 96 and 576: a masked tile; 1,030: a second tile with 6 columns.
WIDTHS = [1, 7, 96, 576, 1030]


def silu(g: torch.Tensor) -> torch.Tensor:
    return g / (1 + torch.exp(-g))


def gelu(g: torch.Tensor) -> torch.Tensor:
    return g / 2 * torch.erfc(-g / math.sqrt(2))


def gelu_tanh(g: torch.Tensor) -> torch.Tensor:
    return g / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)))


ACTIVATIONS = {silu_and_mul: silu, gelu_and_mul: gelu, gelu_tanh_and_mul: gelu_tanh}
EACH_OP = pytest.mark.parametrize("op", ACTIVATIONS, ids=lambda op: op.__name__)


def oracle(op, x: torch.Tensor) -> torch.Tensor:
    gate, up = x.double().cpu().tensor_split(2, dim=-1)
    return ACTIVATIONS[op](gate) * up


@EACH_OP
@given(
    tokens=token_counts,
    width=st.sampled_from(WIDTHS),
    dtype=dtypes,
    pad=st.sampled_from([0, 1, 16]),
    out_pad=st.sampled_from([0, 1, 16]),
    seed=seeds,
)
def test_gated(device, op, tokens, width, dtype, pad, out_pad, seed):
    # Scale 3 reaches both the linear and the vanishing side of the activations.
    x = strided_randn(
        tokens, 2 * width, dtype=dtype, device=device, gen=generator(seed), pad=pad, scale=3.0
    )
    wide = poisoned(tokens, width + out_pad, dtype=dtype, device=device)
    out = wide[:, :width]
    assert op(x, out) is out
    assert_close(out, oracle(op, x))
    assert wide[:, width:].isnan().all()


@EACH_OP
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_a10_extreme_inputs_stay_finite(device, op, dtype):
    # 3e38 squared and cubed, and exp of 1e4, are beyond fp32; 88.5 is where exp(-g) nearly is.
    values = torch.tensor([0.0, 1e-30, 1.0, 20.0, 88.5, 100.0, 1e4, 65_504.0, 3e38])
    values = torch.cat([values, -values]).to(dtype)
    gate = values[values.isfinite()]
    x = torch.stack([gate, torch.full_like(gate, 0.5)], dim=1).to(device)
    out = op(x)
    assert out.isfinite().all()
    assert_close(out, oracle(op, x), scale=x[:, :1].abs().clamp(max=1.0))


def test_gelu_keeps_its_digits_where_erf_cancels(device):
    # 1 + erf(-6) has none left in fp32.
    gate = torch.linspace(-8, 8, 1001, device=device)
    x = torch.stack([gate, torch.ones_like(gate)], dim=1)
    assert_close(gelu_and_mul(x), oracle(gelu_and_mul, x), roundings=64, scale=0.0)


@EACH_OP
@pytest.mark.parametrize("width", [1536, 28_672])
def test_model_widths(device, op, width):
    x = randn(3, 2 * width, dtype=torch.bfloat16, device=device, gen=generator(width), scale=3.0)
    assert_close(op(x), oracle(op, x))


@EACH_OP
def test_the_reference_honours_float64(op):
    x = randn(5, 14, dtype=torch.float64, device=torch.device("cpu"), gen=generator(0))
    out = torch.empty(5, 7, dtype=torch.float64)
    getattr(reference, op.__name__)(out, x)
    assert_close(out, oracle(op, x))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [65_535, 65_536, 70_000])
def test_a22_more_rows_than_a_grid_dimension(cuda, tokens):
    # 2,048 columns are two tiles a row, so one tile a program.
    x = torch.randn(tokens, 4096, dtype=torch.bfloat16, device=cuda)
    halves = [silu_and_mul(part) for part in x.split(tokens // 2 + 1)]
    assert torch.equal(silu_and_mul(x), torch.cat(halves))


@pytest.mark.gpu
def test_a01_more_than_2_31_elements(cuda):
    x = torch.randn(2**31 // 4096 + 2, 4096, dtype=torch.bfloat16, device=cuda)
    assert torch.equal(silu_and_mul(x)[-2:], silu_and_mul(x[-2:].clone()))


@pytest.mark.gpu
@pytest.mark.multi_gpu
@pytest.mark.usefixtures("two_gpus")
def test_a20_device_that_is_not_current():
    x = torch.randn(5, 64)
    first, second = (silu_and_mul(x.to(f"cuda:{index}")) for index in range(2))
    assert second.device.index == 1
    assert torch.cuda.current_device() == 0
    assert torch.equal(first.cpu(), second.cpu())


@pytest.mark.gpu
def test_captured_graph_replays_on_new_values(cuda):
    x = torch.randn(5, 192, device=cuda)
    out = silu_and_mul(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        silu_and_mul(x, out)
    x.copy_(torch.randn(5, 192, device=cuda))
    graph.replay()
    assert torch.equal(out, silu_and_mul(x))


@pytest.mark.gpu
@EACH_OP
def test_compiled_equals_eager(cuda, op):
    compiled = torch.compile(op, fullgraph=True, dynamic=True)
    for tokens in (3, 17):
        x = torch.randn(tokens, 192, dtype=torch.bfloat16, device=cuda)
        assert torch.equal(compiled(x), op(x))


@EACH_OP
def test_a21_opcheck(device, op):
    overload = getattr(torch.ops.echo, op.__name__).default
    wide = torch.randn(5, 200, device=device)
    torch.library.opcheck(overload, (torch.zeros(5, 96, device=device), wide[:, :192]))
    torch.library.opcheck(overload, (torch.zeros(5, 100, device=device)[:, :96], wide[:, 8:]))


def bad_calls(device):
    x = torch.randn(4, 16, device=device)
    yield ValueError, "x has shape (16,), must have 2 dimensions", (x[0],)
    yield ValueError, "x.shape is (4, 15), must have an even last dimension", (x[:, :15],)
    yield ValueError, "x.shape is (4, 0), must have an even last dimension", (x[:, :0],)
    yield TypeError, "x.dtype is float64, must be float16, bfloat16, float32", (x.double(),)
    yield ValueError, "out.shape is (4, 16), must be (4, 8)", (x, x.clone())
    yield TypeError, "out.dtype is float16, must be float32", (x, x[:, :8].half())
    yield ValueError, "x.stride() is (1, 4), must be 1 in the last", (x.T.contiguous().T,)
    yield ValueError, "out.stride() is (16, 2), must be 1 in the last", (x, x.clone()[:, ::2])
    yield ValueError, "x.requires_grad is True", (x.clone().requires_grad_(),)


@EACH_OP
def test_a12_bad_arguments(device, op):
    for error, message, args in bad_calls(device):
        with torch.enable_grad(), pytest.raises(error) as caught:
            op(*args)
        assert message in str(caught.value)


def test_a20_mixed_devices_are_refused():
    with pytest.raises(ValueError, match=r"out\.device is meta, must be cpu as x's is"):
        OPS["silu_and_mul"].check(torch.empty(4, 8, device="meta"), torch.empty(4, 16))


def test_config_fills_a_program_at_every_width():
    for width in (1, 7, 96, 1024, 1536, 28_672):
        config = _config(width)
        assert config.block_m * config.block_n == 1024
        assert config.block_n >= min(width, 1024)
