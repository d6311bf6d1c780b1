"""fused_gate_up against a float64 oracle."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echokernels._library import OPS
from echokernels.activation import reference
from echokernels.activation.gate_up import fused_gate_up
from echokernels.activation.gated import silu_and_mul
from tests.ops.test_gated import gelu, gelu_tanh, silu
from tests.strategies import dtypes, generator, poisoned, randn, seeds, strided_randn
from tests.tolerances import assert_close

ACTIVATIONS = {"silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh}


def oracle(x, weight, bias, activation) -> torch.Tensor:
    projected = x.double().cpu() @ weight.double().cpu().T
    if bias is not None:
        projected += bias.double().cpu()
    gate, up = projected.tensor_split(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up


def make(tokens, k, width, dtype, device, gen, *, bias=False, pad=0):
    """(x, weight, bias) whose projections have a standard deviation of about 1."""
    x = strided_randn(tokens, k, dtype=dtype, device=device, gen=gen, pad=pad)
    weight = strided_randn(
        2 * width, k, dtype=dtype, device=device, gen=gen, pad=pad, scale=max(k, 1) ** -0.5
    )
    return x, weight, randn(2 * width, dtype=dtype, device=device, gen=gen) if bias else None


@given(
    # 17: a tile of 32 tokens; 130: two tiles of 128.
    tokens=st.sampled_from([0, 1, 2, 5, 16, 17, 33, 130]),
    # No input; less than a tile; one and many whole tiles; a ragged last one.
    k=st.sampled_from([0, 1, 7, 64, 256, 1000]),
    width=st.sampled_from([1, 7, 16, 40, 96]),
    bias=st.booleans(),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
    dtype=dtypes,
    pad=st.sampled_from([0, 1, 16]),
    out_pad=st.sampled_from([0, 1, 16]),
    seed=seeds,
)
def test_fused_gate_up(device, tokens, k, width, bias, activation, dtype, pad, out_pad, seed):
    args = make(tokens, k, width, dtype, device, generator(seed), bias=bias, pad=pad)
    wide = poisoned(tokens, width + out_pad, dtype=dtype, device=device)
    out = wide[:, :width]
    assert fused_gate_up(*args, activation, out) is out
    assert_close(out, oracle(*args, activation))
    assert wide[:, width:].isnan().all()


@pytest.mark.parametrize("tokens", [1, 16, 64])
@pytest.mark.parametrize(("k", "width"), [(576, 1536), (1024, 3072)])
def test_model_shapes(device, tokens, k, width):
    args = make(tokens, k, width, torch.bfloat16, device, generator(k))
    assert_close(fused_gate_up(*args), oracle(*args, "silu"))


def test_other_tokens_do_not_reach_a_row(device):
    x, weight, _ = make(5, 96, 24, torch.float32, device, generator(0))
    want = fused_gate_up(x, weight)
    x[2] = float("nan")
    out = fused_gate_up(x, weight)
    assert out[2].isnan().all()
    others = [0, 1, 3, 4]
    assert torch.equal(out[others], want[others])


def test_fp32_is_not_rounded_to_tf32(device):
    # 1 + 2^-20 needs more than the 10 bits of TF32.
    x = torch.full((3, 64), 1 + 2.0**-20, device=device)
    weight = torch.ones(32, 64, device=device) / 64
    assert_close(fused_gate_up(x, weight), oracle(x, weight, None, "silu"))


def test_the_reference_honours_float64():
    x, weight, bias = make(5, 14, 6, torch.float64, torch.device("cpu"), generator(0), bias=True)
    for activation in ACTIVATIONS:
        out = torch.empty(5, 6, dtype=torch.float64)
        reference.fused_gate_up(out, x, weight, bias, activation)
        assert_close(out, oracle(x, weight, bias, activation))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 33, 64, 500])
@pytest.mark.parametrize(("k", "width"), [(4096, 14_336), (8192, 3584)])
def test_agrees_with_the_separate_ops(cuda, tokens, k, width):
    x, weight, _ = make(tokens, k, width, torch.bfloat16, cuda, generator(tokens))
    separate = silu_and_mul(x @ weight.T)
    # Separately the projections are rounded too, and each enters the result linearly or nearly so.
    assert_close(fused_gate_up(x, weight), separate.double(), roundings=4)


@pytest.mark.gpu
def test_a01_weight_of_more_than_2_31_elements(cuda):
    rows = 2**31 // 4096 + 64
    weight = torch.empty(rows, 4096, dtype=torch.bfloat16, device=cuda)
    weight.zero_()
    weight[-64:] = torch.randn(64, 4096, device=cuda) / 64
    weight[rows // 2 - 64 : rows // 2] = torch.randn(64, 4096, device=cuda) / 64
    x = torch.randn(3, 4096, dtype=torch.bfloat16, device=cuda)
    small = torch.cat([weight[rows // 2 - 64 : rows // 2], weight[-64:]])
    assert_close(fused_gate_up(x, weight)[:, -64:], oracle(x, small, None, "silu"))


@pytest.mark.gpu
def test_a01_more_than_2_31_elements_of_x(cuda):
    x = torch.zeros(2**31 // 1024 + 2, 1024, dtype=torch.bfloat16, device=cuda)
    x[-2:] = torch.randn(2, 1024, device=cuda)
    weight = torch.randn(32, 1024, dtype=torch.bfloat16, device=cuda) / 32
    # The same tile of tokens, so the same order of additions.
    assert_close(fused_gate_up(x, weight)[-2:], oracle(x[-2:], weight, None, "silu"))


@pytest.mark.gpu
def test_compiled_equals_eager(cuda):
    compiled = torch.compile(fused_gate_up, fullgraph=True, dynamic=True)
    weight = torch.randn(192, 64, dtype=torch.bfloat16, device=cuda)
    for tokens in (3, 17):
        x = torch.randn(tokens, 64, dtype=torch.bfloat16, device=cuda)
        assert torch.equal(compiled(x, weight), fused_gate_up(x, weight))


def bad_calls(device):
    """(error, message, the arguments that differ from the good ones)."""
    x, weight = torch.ones(4, 16, device=device), torch.ones(12, 16, device=device)
    yield ValueError, "x has shape (16,), must have 2 dimensions", {"x": x[0]}
    yield TypeError, "x.dtype is float64, must be float16, bfloat16, float32", {"x": x.double()}
    yield ValueError, "x.stride() is (1, 4), must be 1 in the last", {"x": x.T.contiguous().T}
    yield ValueError, "weight has shape (16,), must have 2 dimensions", {"weight": weight[0]}
    yield ValueError, "weight.shape is (12, 15), must be (*, 16)", {"weight": weight[:, :15]}
    yield ValueError, "weight.shape is (11, 16), must have an even first", {"weight": weight[:11]}
    yield ValueError, "weight.shape is (0, 16), must have an even first", {"weight": weight[:0]}
    yield TypeError, "weight.dtype is float16, must be float32", {"weight": weight.half()}
    yield ValueError, "weight.stride() is (1, 12)", {"weight": weight.T.contiguous().T}
    yield ValueError, "bias.shape is (6,), must be (12)", {"bias": weight[:6, 0].contiguous()}
    yield TypeError, "bias.dtype is float16, must be float32", {"bias": weight[:, 0].half()}
    yield ValueError, "activation is 'relu', must be 'silu', 'gelu'", {"activation": "relu"}
    yield ValueError, "out.shape is (4, 12), must be (4, 6)", {"out": x[:, :12].clone()}
    yield TypeError, "out.dtype is float16, must be float32", {"out": x[:, :6].half()}
    yield ValueError, "out.stride() is (16, 2)", {"out": x[:, :12:2]}
    yield ValueError, "weight.requires_grad", {"weight": weight.clone().requires_grad_()}


def test_a12_bad_arguments(device):
    good = {"x": torch.ones(4, 16, device=device), "weight": torch.ones(12, 16, device=device)}
    fused_gate_up(**good)
    for error, message, bad in bad_calls(device):
        with torch.enable_grad(), pytest.raises(error) as caught:
            fused_gate_up(**{**good, **bad})
        assert message in str(caught.value)


def test_a20_mixed_devices_are_refused():
    x, weight = torch.empty(4, 16), torch.empty(12, 16)
    with pytest.raises(ValueError, match=r"weight\.device is meta, must be cpu as x's is"):
        OPS["fused_gate_up"].check(torch.empty(4, 6), x, weight.to("meta"), None, "silu")
