"""One request on its way through the engine: its tokens, its pages and how far it has come.

There are no phases. Two counts say all (a third, the tokens scheduled in a step, is the step's):

    token_ids   | prompt ............ | output ....... | placeholders |
                |<- num_computed_tokens ->|<- to compute, in chunks ->|

    num_tokens           prompt and output, placeholders included
    num_computed_tokens  tokens whose KV is valid, or will be once the batches in flight have run

A placeholder stands for a token that a batch in flight is sampling: its place is known, its id is
not yet.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from echokernels.runtime._validation import check_str, check_token_ids
from echokernels.runtime.sampling_params import SamplingParams
from echokernels.runtime.stopping import FinishReason

PLACEHOLDER_ID = -1


class SequenceStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one request. The scheduler owns all fields after `params`; others only read them.

    Raises TypeError or ValueError if `request_id` is not a non-empty str, or if the prompt, which
    `token_ids` gives, is empty or not made of token ids.
    """

    request_id: str
    token_ids: list[int]  # the prompt, copied; then output, then placeholders
    params: SamplingParams
    num_prompt_tokens: int = field(init=False)
    max_total_tokens: int = field(
        init=False, default=0
    )  # cap of prompt + output, from the scheduler
    status: SequenceStatus = field(init=False, default=SequenceStatus.WAITING)
    num_computed_tokens: int = field(init=False, default=0)
    num_placeholders: int = field(init=False, default=0)
    num_in_flight: int = field(init=False, default=0)  # batches launched and not yet committed
    block_table: list[int] = field(init=False, default_factory=list)  # append-only while running
    num_preemptions: int = field(init=False, default=0)
    finish_reason: FinishReason | None = field(init=False, default=None)
    stop_reason: int | str | None = field(
        init=False, default=None
    )  # the stop id or text that was met
    error: str | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        check_str("request_id", self.request_id)
        check_token_ids("prompt", self.token_ids)
        if not self.token_ids:
            raise ValueError(f"prompt of request {self.request_id!r} is empty, must hold a token")
        self.token_ids = list(self.token_ids)
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_known_tokens(self) -> int:
        return len(self.token_ids) - self.num_placeholders

    @property
    def num_output_tokens(self) -> int:
        """Known output tokens."""
        return self.num_known_tokens - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """Known output tokens, as a copy."""
        return self.token_ids[self.num_prompt_tokens : self.num_known_tokens]

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_full(self) -> bool:
        """Its last token is known or being sampled: there is nothing left to schedule."""
        return len(self.token_ids) >= self.max_total_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    def append_placeholder(self) -> None:
        self.token_ids.append(PLACEHOLDER_ID)
        self.num_placeholders += 1

    def resolve_placeholder(self, token_id: int) -> None:
        """The oldest placeholder turns out to be `token_id`."""
        assert self.num_placeholders > 0
        self.token_ids[-self.num_placeholders] = token_id
        self.num_placeholders -= 1

    def drop_placeholders(self) -> None:
        """Forget the tokens that are still being sampled, and the KV of those computed already."""
        del self.token_ids[self.num_known_tokens :]
        self.num_placeholders = 0
        self.num_computed_tokens = min(self.num_computed_tokens, self.num_tokens)

    def check(self, page_size: int) -> None:
        """Assert what holds between any two calls of the scheduler."""
        known = self.num_known_tokens
        assert 0 <= self.num_computed_tokens <= self.num_tokens <= self.max_total_tokens, self
        assert PLACEHOLDER_ID not in self.token_ids[:known], self
        assert self.token_ids[known:] == [PLACEHOLDER_ID] * self.num_placeholders, self
        assert self.num_placeholders <= self.num_in_flight, self
        if self.status is SequenceStatus.RUNNING:
            assert self.num_computed_tokens < self.num_tokens, self
            # All but the last token have a slot, hence all computed ones; and no page is idle.
            num_slots = len(self.block_table) * page_size
            assert self.num_tokens - 1 <= num_slots < self.num_tokens + page_size, self
            assert not self.is_full or self.num_placeholders > 0, self
        elif self.status is SequenceStatus.WAITING:
            assert self.num_computed_tokens == self.num_in_flight == len(self.block_table) == 0, (
                self
            )
        else:
            assert self.finish_reason is not None, self
            assert self.num_placeholders == 0, self
            assert self.num_in_flight > 0 or not self.block_table, self
        assert (self.status is SequenceStatus.FINISHED) == (self.finish_reason is not None), self
