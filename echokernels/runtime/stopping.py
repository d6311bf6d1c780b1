"""When a new token ends a sequence. Stop strings need text and are the engine's."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, NamedTuple

from echokernels.runtime.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


class Stop(NamedTuple):
    finish_reason: FinishReason
    stop_reason: int | None
    """The one of `stop_token_ids` that was met; None for end of sequence and for length."""


def check_stop(
    token_id: int,
    num_output_tokens: int,
    max_output_tokens: int,
    params: SamplingParams,
    eos_token_ids: Collection[int],
) -> Stop | None:
    """The reason to stop after `token_id`, the output's `num_output_tokens`-th token, or None.

    - A token of `stop_token_ids` stops, and so does one of `eos_token_ids` unless `ignore_eos`;
      neither does while the output, this token included, is shorter than `min_tokens`.
    - The length rule comes last: a stop token in the last place is a "stop".
    """
    if num_output_tokens >= params.min_tokens:
        if token_id in params.stop_token_ids:
            return Stop("stop", token_id)
        if token_id in eos_token_ids and not params.ignore_eos:
            return Stop("stop", None)
    if num_output_tokens >= max_output_tokens:
        return Stop("length", None)
    return None
