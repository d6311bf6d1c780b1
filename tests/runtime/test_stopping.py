import pytest

from echokernels.runtime.sampling_params import SamplingParams
from echokernels.runtime.stopping import check_stop

EOS_IDS = (2, 5)


def stop(token_id, num_output_tokens=1, max_output_tokens=10, **params):
    return check_stop(
        token_id, num_output_tokens, max_output_tokens, SamplingParams(**params), EOS_IDS
    )


def test_plain_token_goes_on():
    assert stop(1) is None


@pytest.mark.parametrize("token_id", EOS_IDS)
def test_every_eos_id_stops(token_id):
    assert stop(token_id) == ("stop", None)


def test_a33_ignore_eos_spares_the_models_ids_but_not_the_users():
    assert stop(2, ignore_eos=True) is None
    assert stop(9, ignore_eos=True, stop_token_ids=[9]) == ("stop", 9)
    assert stop(2, ignore_eos=True, stop_token_ids=[2]) == ("stop", 2)


def test_users_stop_id_is_told_even_if_it_is_an_eos_id():
    assert stop(5, stop_token_ids=[5]) == ("stop", 5)


@pytest.mark.parametrize("token_id", [2, 5, 9])  # with several eos ids, none may come through
def test_min_tokens_holds_back_every_stop(token_id):
    assert stop(token_id, 2, min_tokens=3, stop_token_ids=[9]) is None
    assert stop(token_id, 3, min_tokens=3, stop_token_ids=[9]) is not None


def test_length():
    assert stop(1, 9) is None
    assert stop(1, 10) == ("length", None)
    # min_tokens does not lift the cap: the context may end before it.
    assert stop(1, 10, min_tokens=100) == ("length", None)


def test_stop_in_the_last_place_is_a_stop():
    assert stop(2, 10) == ("stop", None)
    assert stop(9, 10, stop_token_ids=[9]) == ("stop", 9)
