"""A deterministic stand-in for model and device. What the scheduler decides must not show in its
tokens.

The next token is a hash of all tokens before it. The device reads those from a paged cache, through
block tables, as attention would: a page that is freed too early, a token that is lost, doubled or
computed in the wrong place changes the hash, or is not found where it should be.
"""

import zlib
from collections import deque
from dataclasses import dataclass
from typing import Any

from echokernels.runtime.block_manager import BlockManager
from echokernels.runtime.config import EngineConfig
from echokernels.runtime.sampling_params import SamplingParams
from echokernels.runtime.scheduler import ScheduledBatch, Scheduler
from echokernels.runtime.sequence import PLACEHOLDER_ID, Sequence

# Small, so that end-of-sequence and stop tokens are drawn often.
VOCAB_SIZE = 7
EOS_IDS = (0, 3)


def next_token(token_ids: list[int]) -> int:
    return zlib.crc32(bytes(token_ids)) % VOCAB_SIZE


def generate(
    prompt: list[int], params: SamplingParams, limit: int
) -> tuple[list[int], str, int | None]:
    """Output, finish reason and stop reason of a request alone, within `limit` tokens in all."""
    output: list[int] = []
    while len(prompt) + len(output) < limit and len(output) != params.max_tokens:
        token_id = next_token(prompt + output)
        output.append(token_id)
        may_stop = len(output) >= params.min_tokens
        if may_stop and token_id in params.stop_token_ids:
            return output, "stop", token_id
        if may_stop and token_id in EOS_IDS and not params.ignore_eos:
            return output, "stop", None
    return output, "length", None


@dataclass
class _Work:
    seq: Sequence
    start: int
    token_ids: list[int]
    block_table: list[int]
    samples: bool


class ToyDevice:
    """Runs batches in the order of launch, each as late as it can: when its result is asked for."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._cache: dict[tuple[int, int], tuple[Sequence, int, int]] = {}
        self._last_sampled: dict[Sequence, int] = {}
        self._queue: deque[list[_Work]] = deque()

    def launch(self, batch: ScheduledBatch) -> None:
        """Copies inputs now; an id that is not known yet is taken from the device when it runs."""
        self._queue.append(
            [
                _Work(
                    entry.seq,
                    entry.start,
                    entry.seq.token_ids[entry.start : entry.start + entry.num_tokens],
                    list(entry.seq.block_table),
                    entry.samples,
                )
                for entry in batch.entries
            ]
        )

    def result(self) -> list[int]:
        """Run the oldest batch and return what it samples."""
        return [self._sample(work) for work in self._run(self._queue.popleft()) if work.samples]

    def _run(self, batch: list[_Work]) -> list[_Work]:
        for work in batch:
            if work.token_ids == [PLACEHOLDER_ID]:
                work.token_ids = [self._last_sampled[work.seq]]
            assert PLACEHOLDER_ID not in work.token_ids, "only a decode's input may be unknown"
            for position, token_id in enumerate(work.token_ids, work.start):
                self._cache[self._cell(work, position)] = (work.seq, position, token_id)
        return batch

    def _sample(self, work: _Work) -> int:
        token_ids = []
        for position in range(work.start + len(work.token_ids)):
            owner, written_position, token_id = self._cache[self._cell(work, position)]
            assert (owner, written_position) == (work.seq, position), "the cache was overwritten"
            token_ids.append(token_id)
        self._last_sampled[work.seq] = next_token(token_ids)
        return self._last_sampled[work.seq]

    def _cell(self, work: _Work, position: int) -> tuple[int, int]:
        return work.block_table[position // self.page_size], position % self.page_size


class ToyEngine:
    """A scheduler with a toy device, checked after every call."""

    def __init__(self, config: EngineConfig) -> None:
        assert config.num_pages is not None
        self.block_manager = BlockManager(config.num_pages, config.page_size)
        self.scheduler = Scheduler(config, self.block_manager, EOS_IDS)
        self.device = ToyDevice(config.page_size)
        self.num_late_samples = 0  # drawn for sequences that had finished

    def add(self, request_id: str, prompt: list[int], **params: Any) -> Sequence:
        seq = Sequence(request_id, prompt, SamplingParams(**params))
        self.scheduler.add(seq)
        self.scheduler.check()
        return seq

    def launch(self) -> ScheduledBatch:
        is_idle = not self.scheduler.in_flight
        batch = self.scheduler.schedule()
        self.scheduler.check()
        if batch.entries:
            self.device.launch(batch)
        elif is_idle:
            assert not self.scheduler.has_unfinished, "no progress"
        return batch

    def commit(self) -> list[Sequence]:
        entries = self.scheduler.in_flight[0].entries
        self.num_late_samples += sum(entry.samples and entry.seq.is_finished for entry in entries)
        finished = self.scheduler.commit(self.scheduler.in_flight[0], self.device.result())
        self.scheduler.check()
        return finished

    def step(self) -> ScheduledBatch:
        """One step without overlap."""
        batch = self.launch()
        if batch.entries:
            self.commit()
        return batch

    def drain(self, depth: int = 1) -> None:
        """Run to the end with at most `depth` batches in flight; then every page must be free."""
        # Far above what any test here needs, so that an endless loop fails.
        for _ in range(10_000):
            if not self.scheduler.has_unfinished and not self.scheduler.in_flight:
                break
            launched = len(self.scheduler.in_flight) < depth and self.launch().entries
            if self.scheduler.in_flight and not (
                launched and len(self.scheduler.in_flight) < depth
            ):
                self.commit()
        else:
            raise AssertionError("the scheduler does not come to an end")
        assert self.block_manager.num_free == self.block_manager.num_pages


NEVER_STOP = {"ignore_eos": True}
ALL_IDS = tuple(range(VOCAB_SIZE))  # as stop ids: the first output stops


def make_engine(num_pages: int = 16, page_size: int = 4, **config: Any) -> ToyEngine:
    """No watermark unless a test asks for it: a page is much of a small cache."""
    return ToyEngine(
        EngineConfig(num_pages=num_pages, page_size=page_size, **({"watermark": 0.0} | config))
    )


def prompt(length: int, salt: int = 0) -> list[int]:
    """The factor 4 is one with which no short prompt is answered by an end-of-sequence token."""
    return [(i * 4 + salt) % 7 for i in range(length)]


def shape(batch: ScheduledBatch) -> list[tuple[str, int, int, bool]]:
    """(request, start, tokens, samples) of each entry."""
    return [(e.seq.request_id, e.start, e.num_tokens, e.samples) for e in batch.entries]


def assert_output(seq: Sequence, limit: int) -> None:
    expected = generate(seq.token_ids[: seq.num_prompt_tokens], seq.params, limit)
    assert (seq.output_token_ids, seq.finish_reason, seq.stop_reason) == expected
