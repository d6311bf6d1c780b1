import copy
import dataclasses
import math
import pickle

import pytest

from echokernels.runtime.sampling_params import SamplingParams


def test_defaults():
    params = SamplingParams()
    assert params.temperature == 1.0
    assert params.max_tokens == 256
    assert (params.top_k, params.top_p, params.min_p) == (0, 1.0, 0.0)
    assert params.stop == params.stop_token_ids == ()
    assert params.seed is None


def test_unknown_field_is_refused_with_its_value_and_the_allowed_ones():
    with pytest.raises(TypeError, match=r"foo=1; allowed: temperature, top_k, .*skip_special"):
        SamplingParams(foo=1)  # type: ignore[call-arg]
    # A field of other engines that is close to one of ours.
    with pytest.raises(TypeError, match="max_new_tokens=5"):
        SamplingParams(temperature=0.5, max_new_tokens=5)  # type: ignore[call-arg]


def test_fields_are_keyword_only_and_frozen():
    with pytest.raises(TypeError, match="positional"):
        SamplingParams(0.5)  # type: ignore[misc]
    params = SamplingParams()
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 0.5  # type: ignore[misc]


def test_copies_are_equal():
    params = SamplingParams(temperature=0.0, stop=["a"], seed=7)
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params
    assert dataclasses.replace(params, seed=8) == SamplingParams(temperature=0.0, stop="a", seed=8)
    assert hash(params) == hash(copy.copy(params))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0),
        ("temperature", 1e-6),
        ("top_k", 1),
        ("top_p", 0),
        ("top_p", 1),
        ("min_p", 1),
        ("seed", 0),
        ("seed", -(2**63)),  # the least signed
        ("seed", 2**64 - 1),  # the greatest unsigned
        ("max_tokens", 1),
        ("max_tokens", None),
        ("stop_token_ids", (0,)),
    ],
)
def test_border_values_are_accepted(field, value):
    assert getattr(SamplingParams(**{field: value}), field) == value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", -0.1),
        ("top_k", -2),
        ("top_p", 1.1),
        ("top_p", -0.1),
        ("top_p", math.nan),
        ("min_p", 1.5),
        ("min_p", math.nan),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("min_tokens", 257),  # one more than the default of max_tokens
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop_token_ids", [1, -1]),
    ],
)
def test_values_out_of_range_are_named(field, value):
    bad = value[1] if isinstance(value, list) else value
    with pytest.raises(ValueError, match=rf"^{field}(\[\d\])? is {bad!r}, must be"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "1"),
        ("temperature", None),
        ("temperature", True),
        ("top_k", 1.0),
        ("top_k", True),
        ("top_k", -1.0),
        ("top_p", "0.5"),
        ("min_p", None),
        ("seed", 1.5),
        ("seed", False),
        ("max_tokens", 2.0),
        ("max_tokens", True),
        ("min_tokens", None),
        ("stop", 5),
        ("stop", None),
        ("stop", {"a"}),
        ("stop", ["a", 5]),
        ("stop_token_ids", 5),
        ("stop_token_ids", "12"),
        ("stop_token_ids", [1, True]),
        ("stop_token_ids", [1, 2.0]),
        ("ignore_eos", 1),
        ("include_stop_str_in_output", "yes"),
        ("skip_special_tokens", None),
    ],
)
def test_wrong_types_are_named(field, value):
    bad = value[1] if isinstance(value, list) else value
    with pytest.raises(TypeError, match=rf"^{field}(\[\d\])? is {bad!r}, must be"):
        SamplingParams(**{field: value})


def test_normalised_forms():
    assert SamplingParams(stop="STOP").stop == ("STOP",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop_token_ids=[1, 2]).stop_token_ids == (1, 2)
    assert SamplingParams(top_k=-1).top_k == 0


def test_min_tokens_may_equal_max_tokens_or_have_no_cap():
    assert SamplingParams(min_tokens=3, max_tokens=3).min_tokens == 3
    assert SamplingParams(min_tokens=1000, max_tokens=None).min_tokens == 1000
    with pytest.raises(ValueError, match="min_tokens is 4, must be at most max_tokens=3"):
        SamplingParams(min_tokens=4, max_tokens=3)
