"""Which sequence computes how many tokens in the next step.

Iteration-level scheduling with chunked prefill (Orca, OSDI 2022; Sarathi-Serve, arXiv:2403.02310)
and preemption by recompute (PagedAttention, arXiv:2309.06180). A step shares out a token budget:

1. decodes, oldest first: sequences whose last token is the only one to compute;
2. chunks, oldest first: sequences with more to compute;
3. admissions, first come first served, if the pages of the whole sequence are free.

Arrival order is kept throughout: every running sequence arrived before every waiting one. So the
youngest running one, which is preempted when a decode finds no page, is the next to be admitted;
not in the same step, for it needs every page that it gave up. Admission takes the pages of a whole
sequence, hence only decodes ever need another one. It also takes budget that is left over, hence no
more sequences run than the budget has tokens, and none of them goes without.

`schedule` may be called again before `commit`: the token that a sequence is sampling is then a
placeholder, and its next step takes it as input on the device. Batches are committed in the order
they were made. A sequence found to be finished while later batches still write to its pages keeps
them until the last of those is committed; what they sample for it is ignored. A sequence in flight
is not preempted: it sits out one step and is preempted in the next.

Progress: if something is unfinished and nothing is in flight, `schedule` returns a non-empty batch.
The oldest running sequence takes its page from younger ones, and alone it fits, for
`max_total_tokens` is at most the cache. If none runs, all pages are free for the first one waiting.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from echokernels.runtime.block_manager import BlockManager
from echokernels.runtime.config import EngineConfig
from echokernels.runtime.sequence import Sequence, SequenceStatus
from echokernels.runtime.stopping import FinishReason, check_stop


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """`seq` computes `num_tokens` tokens from `start` on, then draws the next one if `samples`."""

    seq: Sequence
    start: int
    num_tokens: int
    samples: bool


@dataclass(slots=True, eq=False)
class ScheduledBatch:
    """One step. Sequences of a single token come first; `num_decodes` counts them."""

    entries: list[ScheduledSequence] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_tokens for entry in self.entries)

    @property
    def num_decodes(self) -> int:
        return sum(entry.num_tokens == 1 for entry in self.entries)

    @property
    def num_samples(self) -> int:
        return sum(entry.samples for entry in self.entries)


class Scheduler:
    """Owns the queues and, through `block_manager`, the pages of all sequences."""

    def __init__(
        self,
        config: EngineConfig,
        block_manager: BlockManager,
        eos_token_ids: Collection[int] = (),
    ) -> None:
        self.block_manager = block_manager
        self.eos_token_ids = frozenset(eos_token_ids)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.in_flight: deque[ScheduledBatch] = deque()
        self.num_preemptions = 0
        self._unfinished: dict[str, Sequence] = {}  # running, then waiting: in order of arrival
        self._budget = config.max_num_batched_tokens
        self._max_chunk = config.max_prefill_chunk or self._budget
        self._max_running = config.max_num_seqs
        self._watermark_pages = math.ceil(config.watermark * block_manager.num_pages)
        num_slots = block_manager.num_pages * block_manager.page_size
        self._max_tokens = min(config.max_model_len or num_slots, num_slots)

    @property
    def has_unfinished(self) -> bool:
        """Batches in flight may be left to commit after the last sequence has finished."""
        return bool(self._unfinished)

    def add(self, seq: Sequence) -> None:
        """Queue `seq` and set its `max_total_tokens`.

        A prompt as long as the limit leaves no room for output: `seq` is finished at once, with
        reason "length". Raises ValueError if the prompt is longer, or if an unfinished request has
        the same id; nothing changes then.
        """
        if seq.request_id in self._unfinished:
            raise ValueError(f"request_id is {seq.request_id!r}, must differ from unfinished ones'")
        if seq.num_prompt_tokens > self._max_tokens:
            raise ValueError(
                f"prompt of request {seq.request_id!r} is {seq.num_prompt_tokens} tokens long, "
                f"must be at most {self._max_tokens}, the least of max_model_len and the cache of "
                f"{self.block_manager.num_pages} pages x {self.block_manager.page_size} tokens"
            )
        max_tokens = seq.params.max_tokens
        if max_tokens is None:
            max_tokens = self._max_tokens
        seq.max_total_tokens = min(seq.num_prompt_tokens + max_tokens, self._max_tokens)
        self._unfinished[seq.request_id] = seq
        self.waiting.append(seq)
        if seq.is_full:
            self._retire(seq, "length")

    def schedule(self) -> ScheduledBatch:
        """Decide the next step and take it as launched. An empty batch must not be committed.

        Read what the batch needs of its sequences before the next call of any method here.
        """
        step = _Step(self._budget, self._max_chunk)
        ready = [seq for seq in self.running if not seq.is_full]
        decodes = [seq for seq in ready if seq.num_uncomputed_tokens == 1]
        chunks = [seq for seq in ready if seq.num_uncomputed_tokens > 1]
        for seq in decodes:
            if step.may_run(seq) and self._find_page(seq, step):
                step.take(seq)
        for seq in filter(step.may_run, chunks):
            step.take(seq)
        self._admit(step)
        batch = step.batch()
        if batch.entries:
            self.in_flight.append(batch)
        return batch

    def commit(self, batch: ScheduledBatch, token_ids: list[int]) -> list[Sequence]:
        """Take in what `batch` sampled: one id for each entry that samples, in order.

        Returns the sequences that a token rule has finished. Ids for sequences that are finished
        already are ignored: after a failed step, `fail` its sequences and commit any ids. Raises
        ValueError, and changes nothing, if `batch` is not the oldest in flight or ids do not fit.
        """
        if not self.in_flight or batch is not self.in_flight[0]:
            raise ValueError("batch is out of order, must be the oldest one in flight")
        if len(token_ids) != batch.num_samples or min(token_ids, default=0) < 0:
            wanted = f"{batch.num_samples} ids, none negative"
            raise ValueError(f"token_ids is {token_ids}, must be {wanted}")
        self.in_flight.popleft()
        sampled = iter(token_ids)
        finished = []
        for entry in batch.entries:
            seq = entry.seq
            seq.num_in_flight -= 1
            token_id = next(sampled) if entry.samples else None
            if seq.is_finished:
                self._release(seq)
            elif token_id is not None and self._accept(seq, token_id):
                finished.append(seq)
        return finished

    def abort(self, request_id: str) -> bool:
        """Finish the request with reason "abort". False if there is no such unfinished request."""
        seq = self._unfinished.get(request_id)
        if seq is None:
            return False
        self._retire(seq, "abort")
        return True

    def finish(
        self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        """Finish `seq` for a reason of the engine's, for instance a stop string.

        If a token rule has finished it, only the reasons are replaced: a stop string completed by
        the last token that was allowed is a "stop". An "abort" or "error" stays.
        """
        if not seq.is_finished:
            self._retire(seq, reason, stop_reason)
        elif seq.finish_reason not in ("abort", "error"):
            seq.finish_reason, seq.stop_reason = reason, stop_reason

    def fail(self, seq: Sequence, message: str) -> None:
        """Finish `seq` with reason "error". Nothing happens if it is finished already."""
        if not seq.is_finished:
            self._retire(seq, "error")
            seq.error = message

    def check(self) -> None:
        """Assert every invariant of queues, sequences, pages and batches in flight."""
        arrived = list(self._unfinished.values())
        assert arrived == [*self.running, *self.waiting], "queues are not in order of arrival"
        assert len(self.running) <= self._max_running, f"{len(self.running)} sequences run"
        num_ready = sum(not seq.is_full for seq in self.running)
        assert num_ready <= self._budget, f"{num_ready} sequences share a budget of {self._budget}"
        assert all(seq.status is SequenceStatus.RUNNING for seq in self.running)
        assert all(seq.status is SequenceStatus.WAITING for seq in self.waiting)
        entries = [entry for batch in self.in_flight for entry in batch.entries]
        late = {entry.seq for entry in entries if entry.seq.is_finished}
        page_size = self.block_manager.page_size
        for seq in [*arrived, *late]:
            seq.check(page_size)
            assert seq.num_in_flight == sum(entry.seq is seq for entry in entries), seq
        for entry in entries:
            end = entry.start + entry.num_tokens
            assert end <= len(entry.seq.block_table) * page_size, f"{entry} writes to freed pages"
        self.block_manager.check(seq.block_table for seq in [*self.running, *late])

    def _find_page(self, seq: Sequence, step: _Step) -> bool:
        """Make the pages of a decode reach its last token, at the cost of younger sequences."""
        while not self.block_manager.append(seq.block_table, seq.num_tokens):
            youngest = self.running[-1]
            if youngest is seq:
                return False
            if youngest.num_in_flight > 0:
                step.held = youngest
                return False
            self._preempt(youngest)
        return True

    def _preempt(self, seq: Sequence) -> None:
        assert seq.num_in_flight == 0
        self.running.remove(seq)
        self.waiting.appendleft(seq)
        self.block_manager.free(seq.block_table)
        seq.status = SequenceStatus.WAITING
        seq.num_computed_tokens = 0
        seq.num_preemptions += 1
        self.num_preemptions += 1

    def _admit(self, step: _Step) -> None:
        while self.waiting and step.budget > 0 and len(self.running) < self._max_running:
            seq = self.waiting[0]
            kept_free = self._watermark_pages if self.running else 0
            needed = self.block_manager.blocks_needed(seq.num_tokens)
            if needed + kept_free > self.block_manager.num_free:
                return
            self.block_manager.append(seq.block_table, seq.num_tokens)
            self.running.append(self.waiting.popleft())
            seq.status = SequenceStatus.RUNNING
            step.take(seq)

    def _accept(self, seq: Sequence, token_id: int) -> bool:
        """Put `token_id` in the place kept for it; True if it finishes `seq`."""
        seq.resolve_placeholder(token_id)
        max_output_tokens = seq.max_total_tokens - seq.num_prompt_tokens
        stop = check_stop(
            token_id, seq.num_output_tokens, max_output_tokens, seq.params, self.eos_token_ids
        )
        if stop is None:
            return False
        self._retire(seq, stop.finish_reason, stop.stop_reason)
        return True

    def _retire(
        self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        del self._unfinished[seq.request_id]
        queue = self.running if seq.status is SequenceStatus.RUNNING else self.waiting
        queue.remove(seq)
        seq.drop_placeholders()
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason, seq.stop_reason = reason, stop_reason
        self._release(seq)

    def _release(self, seq: Sequence) -> None:
        """Free the pages of a finished sequence, unless a batch in flight still writes to them."""
        if seq.num_in_flight == 0:
            self.block_manager.free(seq.block_table)


@dataclass(slots=True)
class _Step:
    """A batch in the making."""

    budget: int
    max_chunk: int
    entries: list[ScheduledSequence] = field(default_factory=list)
    held: Sequence | None = None  # sits this step out, to be preempted in the next

    def may_run(self, seq: Sequence) -> bool:
        return seq is not self.held and seq.status is SequenceStatus.RUNNING

    def take(self, seq: Sequence) -> None:
        """Let `seq` compute as much as limits and budget allow, and count that as done."""
        num_tokens = min(seq.num_uncomputed_tokens, self.max_chunk, self.budget)
        if num_tokens == 0:
            return
        samples = num_tokens == seq.num_uncomputed_tokens
        self.entries.append(ScheduledSequence(seq, seq.num_computed_tokens, num_tokens, samples))
        self.budget -= num_tokens
        seq.num_computed_tokens += num_tokens
        seq.num_in_flight += 1
        if samples:
            seq.append_placeholder()

    def batch(self) -> ScheduledBatch:
        return ScheduledBatch(sorted(self.entries, key=lambda entry: entry.num_tokens > 1))
