"""The engine: requests in, tokens out, one step at a time.

    step():  schedule -> execute -> postprocess

`max_steps_in_flight` steps may be launched before the ids of the first are waited for. With 1 every
step waits for its own; with 2 the host prepares a step while the device runs the one before it.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from echokernels.runtime._validation import check_int
from echokernels.runtime.block_manager import BlockManager
from echokernels.runtime.detokenizer import IncrementalDetokenizer
from echokernels.runtime.model_runner import ModelRunner, StepHandle
from echokernels.runtime.outputs import RequestMetrics, RequestOutput
from echokernels.runtime.sampler import derive_seed
from echokernels.runtime.sampling_params import SamplingParams
from echokernels.runtime.scheduler import ScheduledBatch, Scheduler
from echokernels.runtime.sequence import Sequence
from echokernels.runtime.tokenizer import Tokenizer

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineStats:
    num_running: int
    num_waiting: int
    num_used_pages: int
    num_pages: int
    num_preemptions: int
    """Since the engine was made, as are the next two."""
    num_steps: int
    num_computed_tokens: int
    """Prompt and output tokens that went through the model, recomputed ones included."""


@dataclass(slots=True)
class _Request:
    seq: Sequence
    output: RequestOutput
    detokenizer: IncrementalDetokenizer | None


@dataclass(slots=True)
class _FailedStep:
    """Stands in for a step that could not be launched, so that it is committed in its turn."""

    error: BaseException

    def token_ids(self) -> list[int]:
        raise self.error


class LLMEngine:
    """Owns the scheduler and drives `runner`. Not safe for use by several threads.

    Without a tokenizer, prompts are token ids and outputs have no text.
    """

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Collection[int] = (),
        max_steps_in_flight: int = 1,
    ) -> None:
        check_int("max_steps_in_flight", max_steps_in_flight, low=1)
        self.runner = runner
        self.tokenizer = tokenizer
        self.scheduler = Scheduler(
            runner.config,
            BlockManager(runner.num_pages, runner.config.page_size),
            eos_token_ids,
        )
        self._requests: dict[str, _Request] = {}
        self._in_flight: deque[tuple[ScheduledBatch, StepHandle | _FailedStep]] = deque()
        self._max_steps_in_flight = max_steps_in_flight
        self._num_seeds = 0
        self._num_steps = 0
        self._num_computed_tokens = 0

    def add_request(
        self, request_id: str, prompt: str | Seq[int], params: SamplingParams | None = None
    ) -> RequestOutput:
        """Queues a request and returns its output, which the following steps fill in.

        `prompt` is text or token ids. A prompt as long as the context has room for no output: it is
        finished at once, with reason "length". Raises ValueError or TypeError, and changes nothing,
        for an id in use and for a prompt that is empty, longer than the context or the cache, or
        has ids outside the vocabulary.
        """
        arrival_time = time.perf_counter()
        params = self._seeded(params or SamplingParams())
        token_ids = self._encode(prompt)
        seq = Sequence(request_id, token_ids, params)
        self._check_token_ids(token_ids)
        detokenizer = self._detokenizer(token_ids, params)
        self.scheduler.add(seq)
        output = RequestOutput(
            request_id,
            prompt if isinstance(prompt, str) else None,
            token_ids,
            RequestMetrics(arrival_time),
        )
        self._requests[request_id] = _Request(seq, output, detokenizer)
        if seq.is_finished:
            self._finish(self._requests[request_id])
        return output

    def abort(self, request_id: str) -> bool:
        """Ends a request with reason "abort". False if there is no such unfinished request."""
        if not self.scheduler.abort(request_id):
            return False
        self._finish(self._requests[request_id])
        return True

    @property
    def has_unfinished(self) -> bool:
        """There is something for `step` to do."""
        return self.scheduler.has_unfinished or bool(self._in_flight)

    def step(self) -> list[RequestOutput]:
        """Launches the next step, takes in the oldest in flight and returns the outputs it changed.

        If a step fails, its requests finish with reason "error" and the engine lives on. So it does
        if a step is interrupted (KeyboardInterrupt), which is raised again.
        """
        batch = self.scheduler.schedule()
        if batch.entries:
            self._in_flight.append((batch, self._launch(batch)))
            if len(self._in_flight) < self._max_steps_in_flight:
                return []
        return self._collect(*self._in_flight.popleft()) if self._in_flight else []

    def check(self) -> None:
        """Asserts every invariant; for tests."""
        self.scheduler.check()
        assert [batch for batch, _ in self._in_flight] == list(self.scheduler.in_flight)
        unfinished = [*self.scheduler.running, *self.scheduler.waiting]
        assert [request.seq for request in self._requests.values()] == unfinished
        for request in self._requests.values():
            assert request.output.token_ids == request.seq.output_token_ids

    def stats(self) -> EngineStats:
        pages = self.scheduler.block_manager
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            num_used_pages=pages.num_used,
            num_pages=pages.num_pages,
            num_preemptions=self.scheduler.num_preemptions,
            num_steps=self._num_steps,
            num_computed_tokens=self._num_computed_tokens,
        )

    def _seeded(self, params: SamplingParams) -> SamplingParams:
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params is {params!r}, must be SamplingParams")
        if params.seed is not None:
            return params
        self._num_seeds += 1
        return dataclasses.replace(
            params, seed=derive_seed(self.runner.config.seed, self._num_seeds)
        )

    def _encode(self, prompt: str | Seq[int]) -> list[int]:
        if isinstance(prompt, list | tuple):
            return list(prompt)
        if not isinstance(prompt, str):
            raise TypeError(f"prompt is {prompt!r}, must be a str or a list of token ids")
        if self.tokenizer is None:
            raise ValueError("prompt is text, must be token ids: there is no tokenizer")
        return self.tokenizer.encode(prompt)

    def _check_token_ids(self, token_ids: list[int]) -> None:
        vocab_size = self.runner.model_config.vocab_size
        if max(token_ids) >= vocab_size:
            raise ValueError(
                f"prompt holds token id {max(token_ids)}, must be below vocab_size={vocab_size}"
            )

    def _detokenizer(
        self, prompt_token_ids: list[int], params: SamplingParams
    ) -> IncrementalDetokenizer | None:
        if self.tokenizer is None:
            if params.stop:
                raise ValueError(f"stop is {params.stop!r}, must be empty: there is no tokenizer")
            return None
        return IncrementalDetokenizer(
            self.tokenizer,
            prompt_token_ids,
            params.skip_special_tokens,
            params.stop,
            params.include_stop_str_in_output,
        )

    def _launch(self, batch: ScheduledBatch) -> StepHandle | _FailedStep:
        self._num_steps += 1
        self._num_computed_tokens += batch.num_tokens
        try:
            return self.runner.execute(batch)
        except BaseException as error:
            return _FailedStep(error)

    def _collect(
        self, batch: ScheduledBatch, handle: StepHandle | _FailedStep
    ) -> list[RequestOutput]:
        interrupt: BaseException | None = None
        try:
            token_ids = handle.token_ids()
        except BaseException as error:
            token_ids = self._fail(batch, error)
            interrupt = None if isinstance(error, Exception) else error
        changed = self._commit(batch, token_ids)
        if interrupt is not None:
            raise interrupt
        return changed

    def _fail(self, batch: ScheduledBatch, error: BaseException) -> list[int]:
        """Fails the requests of `batch`; returns ids to commit, which nobody will see."""
        # The requests only carry the message; whoever runs the engine needs the traceback.
        _logger.error("a step of %d requests failed", len(batch.entries), exc_info=error)
        for entry in batch.entries:
            self.scheduler.fail(entry.seq, f"the step failed: {type(error).__name__}: {error}")
        return [0] * batch.num_samples

    def _commit(self, batch: ScheduledBatch, token_ids: list[int]) -> list[RequestOutput]:
        self.scheduler.commit(batch, token_ids)
        now = time.perf_counter()
        changed = []
        for entry in batch.entries:
            request = self._requests.get(entry.seq.request_id)
            if request is not None and self._update(request, now):
                changed.append(request.output)
        return changed

    def _update(self, request: _Request, now: float) -> bool:
        """Brings the output up to its sequence; False if nothing was new."""
        seq, output = request.seq, request.output
        if seq.num_output_tokens > len(output.token_ids):
            if not output.token_ids:
                output.metrics.first_token_time = now
            self._append(request, seq.token_ids[seq.num_known_tokens - 1])
        elif not seq.is_finished:
            return False
        if seq.is_finished:
            self._finish(request)
        return True

    def _append(self, request: _Request, token_id: int) -> None:
        seq, output, detokenizer = request.seq, request.output, request.detokenizer
        output.token_ids.append(token_id)
        # A token that is a reason to stop is no part of the text.
        ends_text = seq.finish_reason == "stop" and not seq.params.include_stop_str_in_output
        if detokenizer is None or ends_text:
            return
        output.text += detokenizer.push(token_id)
        if detokenizer.stopped is not None:
            self.scheduler.finish(seq, "stop", detokenizer.stopped)

    def _finish(self, request: _Request) -> None:
        seq, output, detokenizer = request.seq, request.output, request.detokenizer
        if detokenizer is not None:
            output.text += detokenizer.finish()
        output.finish_reason, output.stop_reason = seq.finish_reason, seq.stop_reason
        output.error = seq.error
        output.metrics.finished_time = time.perf_counter()
        output.metrics.num_preemptions = seq.num_preemptions
        del self._requests[seq.request_id]
