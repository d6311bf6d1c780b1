"""rope_table against formulas in float64 and against transformers' own frequencies."""

import math
import re

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from echokernels.attention.rope_table import rope_table

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LINEAR = {"rope_type": "linear", "factor": 4.0}


def frequencies(table: torch.Tensor) -> torch.Tensor:
    """From the row of position 1, whose angles are at most 1 and so unambiguous."""
    cos, sin = table[1].double().chunk(2)
    return torch.atan2(sin, cos)


def transformers_frequencies(head_dim: int, theta: float, scaling: dict) -> torch.Tensor:
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        rope_parameters={**scaling, "rope_theta": theta},
    )
    inv_freq, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    assert factor == 1.0
    return inv_freq.double()


def test_entries_are_exact_to_fp32():
    table = rope_table(8, 1000, theta=500.0)
    assert table.dtype == torch.float32
    assert table.shape == (1000, 8)
    for position in (0, 1, 17, 999):
        for pair in range(4):
            angle = position * 500.0 ** (-2 * pair / 8)
            # Half an ulp of a value up to 1, plus what float64 leaves of a large angle.
            assert table[position, pair].item() == pytest.approx(math.cos(angle), abs=2.0**-24)
            assert table[position, 4 + pair].item() == pytest.approx(math.sin(angle), abs=2.0**-24)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("scaling", [LINEAR, LLAMA3], ids=lambda scaling: scaling["rope_type"])
def test_scaled_frequencies_equal_transformers(head_dim, theta, scaling):
    have = frequencies(rope_table(head_dim, 2, theta, scaling))
    want = transformers_frequencies(head_dim, theta, scaling)
    # Transformers computes them in fp32; 16 roundoffs.
    torch.testing.assert_close(have, want, rtol=2.0**-20, atol=0.0)


def test_llama3_has_all_three_bands():
    # Else the comparison with transformers would not cover them.
    ratio = frequencies(rope_table(64, 2, 500_000.0)) / frequencies(
        rope_table(64, 2, 500_000.0, LLAMA3)
    )
    assert ratio[0].item() == pytest.approx(1.0, rel=1e-6)
    assert ratio[-1].item() == pytest.approx(32.0, rel=1e-6)
    assert ((ratio > 1.01) & (ratio < 31.9)).any()


def test_factors_divide_the_frequencies():
    factors = [1.0, 2.0, 3.5, 8.0]
    have = frequencies(rope_table(8, 2, scaling={"rope_type": "factors", "factors": factors}))
    want = frequencies(rope_table(8, 2)) / torch.tensor(factors).double()
    torch.testing.assert_close(have, want, rtol=2.0**-22, atol=0.0)


@pytest.mark.parametrize("scaling", [None, {"rope_type": "default"}, {"type": "default"}])
def test_default(scaling):
    assert torch.equal(rope_table(16, 32, scaling=scaling), rope_table(16, 32, 10_000.0))


def test_the_older_name_of_the_type():
    older = {"type": "linear", "factor": 4.0}
    assert torch.equal(rope_table(16, 32, scaling=older), rope_table(16, 32, scaling=LINEAR))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rotary_dim": 7}, "rotary_dim is 7, must be even and at least 2"),
        ({"rotary_dim": 0}, "rotary_dim is 0"),
        ({"max_position": -1}, "max_position is -1, must be at least 0"),
        ({"theta": 0.0}, "theta is 0.0, must be positive and finite"),
        ({"theta": float("nan")}, "theta is nan"),
        (
            {"scaling": {"rope_type": "yarn", "factor": 4.0}},
            "rope_type is 'yarn', must be one of default, linear, llama3, factors",
        ),
        ({"scaling": {"factor": 4.0}}, "rope_type is None, must be one of default"),
        ({"scaling": {"rope_type": "linear"}}, "must have 'factor'"),
        ({"scaling": {**LINEAR, "factor": 0.0}}, "factor is 0.0, must be positive and finite"),
        (
            {"scaling": {**LLAMA3, "high_freq_factor": 1.0}},
            "high_freq_factor is 1.0, must exceed low_freq_factor = 1.0",
        ),
        (
            {"scaling": {"rope_type": "factors", "factors": [1.0, 2.0]}},
            "factors are 2, must be rotary_dim / 2 = 4",
        ),
        (
            {"scaling": {"rope_type": "factors", "factors": [1.0, 2.0, 0.0, 1.0]}},
            "must all be positive",
        ),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        rope_table(**{"rotary_dim": 8, "max_position": 4, **arguments})
