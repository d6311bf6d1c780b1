"""Any order of calls gives every request the tokens that it gets when it is alone."""

import random
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from echokernels.runtime.config import EngineConfig
from echokernels.runtime.sequence import Sequence
from tests.runtime.toy_model import VOCAB_SIZE, ToyEngine, generate

MAX_IN_FLIGHT = 2

token_ids = st.integers(0, VOCAB_SIZE - 1)

configs = st.builds(
    EngineConfig,
    max_model_len=st.sampled_from([None, 10]),
    page_size=st.integers(1, 3),
    num_pages=st.integers(3, 8),
    max_num_seqs=st.sampled_from([4, 3, 2, 1]),
    max_num_batched_tokens=st.sampled_from([20, 9, 4, 2, 1]),
    max_prefill_chunk=st.sampled_from([None, 1, 3]),
    # 0.01 of these few pages is one of them, 0.3 is two or three.
    watermark=st.sampled_from([0.0, 0.01, 0.3]),
)

sampling_params = st.fixed_dictionaries(
    {
        "max_tokens": st.sampled_from([None, 9, 3]),
        "min_tokens": st.integers(0, 1),
        "stop_token_ids": st.sampled_from([(), (), (1,), (6, 2)]),
        # Mostly ignored: else two of seven tokens end the output, and few sequences meet.
        "ignore_eos": st.sampled_from([True, True, True, False]),
    }
)


# Few names, so that they are used again while a batch with the former owner is in flight.
requests = st.tuples(
    st.sampled_from("abcdefgh"), st.lists(token_ids, min_size=1, max_size=6), sampling_params
)


@dataclass
class Interruption:
    """What a request looked like when something other than a token rule finished it."""

    reason: str
    output: list[int]


class SchedulerMachine(RuleBasedStateMachine):
    # It starts crowded: hypothesis leaves rules out of many runs, and without `add` little happens.
    @initialize(config=configs, first=st.lists(requests, min_size=3, max_size=8))
    def build(self, config, first):
        self.config = config
        self.engine = ToyEngine(config)
        num_slots = config.num_pages * config.page_size
        self.limit = min(config.max_model_len or num_slots, num_slots)
        self.requests: list[Sequence] = []
        self.interrupted: dict[Sequence, Interruption] = {}
        for request in first:
            self.add(request)

    def unfinished(self):
        return [seq for seq in self.requests if not seq.is_finished]

    @rule(request=requests)
    def add(self, request):
        name, prompt, params = request
        is_taken = any(seq.request_id == name for seq in self.unfinished())
        if is_taken or len(prompt) > self.limit:
            with pytest.raises(ValueError, match="request_id" if is_taken else "tokens long"):
                self.engine.add(name, prompt, **params)
        else:
            self.requests.append(self.engine.add(name, prompt, **params))

    @precondition(lambda self: len(self.engine.scheduler.in_flight) < MAX_IN_FLIGHT)
    @rule()
    def launch(self):
        batch = self.engine.launch()
        counts = [entry.num_tokens for entry in batch.entries]
        assert sum(counts) == batch.num_tokens <= self.config.max_num_batched_tokens
        assert len(counts) <= self.config.max_num_seqs
        assert all(0 < count <= (self.config.max_prefill_chunk or count) for count in counts)
        assert [count == 1 for count in counts] == [
            i < batch.num_decodes for i in range(len(counts))
        ]

    @precondition(lambda self: self.engine.scheduler.in_flight)
    @rule()
    def commit(self):
        before = self.unfinished()
        finished = self.engine.commit()
        assert set(finished) == set(before) - set(self.unfinished())
        assert len(finished) == len(set(finished))

    @rule(num_steps=st.integers(1, 10))
    def run(self, num_steps):
        for _ in range(num_steps):
            if len(self.engine.scheduler.in_flight) < MAX_IN_FLIGHT:
                self.launch()
            if len(self.engine.scheduler.in_flight) == MAX_IN_FLIGHT:
                self.commit()

    # Of few, or most requests would end before they meet others.
    @precondition(lambda self: self.unfinished() and 4 * len(self.interrupted) < len(self.requests))
    @rule(data=st.data(), reason=st.sampled_from(["abort", "stop", "error"]))
    def interrupt(self, data, reason):
        seq = data.draw(st.sampled_from(self.unfinished()), label="request")
        scheduler = self.engine.scheduler
        if reason == "abort":
            assert scheduler.abort(seq.request_id)
            assert not scheduler.abort(seq.request_id)
        elif reason == "stop":
            scheduler.finish(seq, "stop", "STOP")
        else:
            scheduler.fail(seq, "broken")
        self.interrupted[seq] = Interruption(reason, seq.output_token_ids)

    @invariant()
    def everything_is_consistent(self):
        self.engine.scheduler.check()
        arrived = [*self.engine.scheduler.running, *self.engine.scheduler.waiting]
        assert arrived == self.unfinished()

    def teardown(self):
        if not hasattr(self, "engine"):  # hypothesis gave up before `build`
            return
        self.engine.drain(depth=MAX_IN_FLIGHT)
        for seq in self.requests:
            self.check_output(seq)

    def check_output(self, seq):
        prompt = seq.token_ids[: seq.num_prompt_tokens]
        expected = generate(prompt, seq.params, self.limit)
        if seq in self.interrupted:
            interruption = self.interrupted[seq]
            output = interruption.output
            assert output == expected[0][: len(output)]
            assert (seq.output_token_ids, seq.finish_reason) == (output, interruption.reason)
        else:
            assert (seq.output_token_ids, seq.finish_reason, seq.stop_reason) == expected


TestScheduler = SchedulerMachine.TestCase
# Requests must meet, run out of pages and come back: the default of 50 steps is short for that.
TestScheduler.settings = settings(stateful_step_count=80)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("page_size", [1, 3])
def test_crowded_cache(depth, page_size):
    """What the state machine meets by luck is certain here: preemptions and late stops."""
    rng = random.Random(page_size)
    config = EngineConfig(
        num_pages=24 // page_size,
        page_size=page_size,
        max_num_seqs=6,
        max_num_batched_tokens=10,
        max_prefill_chunk=5,
        watermark=0.0,
    )
    engine = ToyEngine(config)
    seqs = [
        engine.add(
            str(i),
            [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 9))],
            max_tokens=rng.choice([1, 4, None]),
            ignore_eos=rng.random() < 0.5,
        )
        for i in range(40)
    ]
    engine.drain(depth)
    for seq in seqs:
        expected = generate(seq.token_ids[: seq.num_prompt_tokens], seq.params, limit=24)
        assert (seq.output_token_ids, seq.finish_reason, seq.stop_reason) == expected
    assert engine.scheduler.num_preemptions > 0
    assert (engine.num_late_samples > 0) == (depth > 1)
