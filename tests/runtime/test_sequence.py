"""A sequence's own bookkeeping."""

import pytest

from echokernels.runtime.sampling_params import SamplingParams
from echokernels.runtime.sequence import Sequence


def test_sequence_copies_its_prompt():
    token_ids = [1, 2]
    seq = Sequence("a", token_ids, SamplingParams())
    seq.append_placeholder()
    assert token_ids == [1, 2]
    assert (seq.num_tokens, seq.num_prompt_tokens) == (3, 2)


@pytest.mark.parametrize(
    ("request_id", "token_ids", "error", "match"),
    [
        ("", [1], ValueError, "request_id"),
        (7, [1], TypeError, "request_id is 7"),
        ("a", [1, -1], ValueError, r"prompt\[1\] is -1"),  # the id of placeholders
        ("a", [1.0], TypeError, r"prompt\[0\] is 1.0"),
        ("a", "text", TypeError, "prompt is 'text'"),
    ],
)
def test_sequence_checks_its_arguments(request_id, token_ids, error, match):
    with pytest.raises(error, match=match):
        Sequence(request_id, token_ids, SamplingParams())
