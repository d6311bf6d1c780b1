"""The engine between scheduler and user, with a runner that samples what a script says."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from echokernels.runtime.config import EngineConfig
from echokernels.runtime.engine import LLMEngine
from echokernels.runtime.outputs import RequestOutput
from echokernels.runtime.sampling_params import SamplingParams
from echokernels.runtime.scheduler import ScheduledBatch
from echokernels.runtime.tokenizer import Tokenizer
from tests.runtime.test_detokenizer import byte_level

VOCAB_SIZE = 100
EOS = 99


class ScriptedRunner:
    """`scripts` hold the output of each request id; `failures` are what steps of a number raise."""

    def __init__(
        self,
        scripts: dict[str, list[int]],
        failures: dict[int, BaseException] | None = None,
        late: bool = False,
        **config: object,
    ) -> None:
        sizes = {"page_size": 4, "num_pages": 16, "max_model_len": 40} | config
        self.config = EngineConfig(**sizes)  # type: ignore[arg-type]
        self.num_pages = self.config.num_pages
        self.model_config = SimpleNamespace(vocab_size=VOCAB_SIZE)
        self.scripts = scripts
        self.failures = failures or {}
        self.fails_late = late  # when the ids are asked for, as a GPU's errors do
        self.num_steps = 0

    def execute(self, batch: ScheduledBatch) -> SimpleNamespace:
        failure = self.failures.get(self.num_steps)
        self.num_steps += 1
        if failure and not self.fails_late:
            raise failure
        token_ids = [
            self.scripts[entry.seq.request_id][
                entry.start + entry.num_tokens - entry.seq.num_prompt_tokens
            ]
            for entry in batch.entries
            if entry.samples
        ]

        def read() -> list[int]:
            if failure:
                raise failure
            return token_ids

        return SimpleNamespace(token_ids=read)


def make_engine(
    scripts: dict[str, list[int]],
    tokenizer: Tokenizer | None = None,
    steps_in_flight: int = 1,
    **runner: object,
) -> LLMEngine:
    scripted = ScriptedRunner(scripts, **runner)  # type: ignore[arg-type]
    return LLMEngine(scripted, tokenizer, (EOS,), steps_in_flight)  # type: ignore[arg-type]


def drain(engine: LLMEngine) -> None:
    """Steps to the end, checked after each; then no page may be in use."""
    engine.check()
    for _ in range(200):  # more than any test here needs
        if not engine.has_unfinished:
            break
        engine.step()
        engine.check()
    assert not engine.has_unfinished
    assert engine.stats().num_used_pages == 0


def run(engine: LLMEngine, request_id: str, **params: object) -> RequestOutput:
    output = engine.add_request(request_id, [1, 2, 3], SamplingParams(**params))  # type: ignore[arg-type]
    drain(engine)
    return output


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
@pytest.mark.parametrize(
    ("params", "token_ids", "reason", "stop_reason"),
    [
        ({}, [5, 6, 7, EOS], "stop", None),
        ({"max_tokens": 2}, [5, 6], "length", None),
        ({"stop_token_ids": [6]}, [5, 6], "stop", 6),
        ({"ignore_eos": True, "max_tokens": 5}, [5, 6, 7, EOS, 8], "length", None),
        ({"ignore_eos": True, "stop_token_ids": [8]}, [5, 6, 7, EOS, 8], "stop", 8),
        ({"min_tokens": 5, "max_tokens": 5}, [5, 6, 7, EOS, 8], "length", None),
    ],
)
def test_finish_reasons(
    params: dict[str, object],
    token_ids: list[int],
    reason: str,
    stop_reason: int | None,
    steps_in_flight: int,
) -> None:
    """Also while later tokens are being computed: what came too late is not in the output."""
    engine = make_engine({"x": [5, 6, 7, EOS, 8, 9, 9, 9]}, steps_in_flight=steps_in_flight)
    output = run(engine, "x", **params)
    assert output.token_ids == token_ids
    assert (output.finish_reason, output.stop_reason) == (reason, stop_reason)
    assert output.error is None


PIECES = byte_level(b"ab", b"cST", b"OPde", b"fg")


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize(
    ("include", "text"), [(False, "abc"), (True, "abcSTOP")], ids=["without", "with"]
)
def test_a33_a_stop_string_over_token_borders(
    include: bool, text: str, steps_in_flight: int
) -> None:
    engine = make_engine({"x": [0, 1, 2, 3, 3, 3, 3]}, PIECES, steps_in_flight)
    params = SamplingParams(stop="STOP", include_stop_str_in_output=include)
    output = engine.add_request("x", [3], params)
    seen = []
    while engine.has_unfinished:
        engine.step()
        engine.check()
        seen.append(output.text)
    # Of "cST" only the c is certain before the next token is there.
    in_order = [*dict.fromkeys(piece for piece in seen if piece)]
    assert in_order == (["ab", "abc", "abcSTOP"] if include else ["ab", "abc"])
    assert output.text == text
    assert (output.finish_reason, output.stop_reason) == ("stop", "STOP")
    assert output.token_ids == [0, 1, 2]


def test_a33_a_stop_string_in_the_last_allowed_token_is_a_stop() -> None:
    output = run(make_engine({"x": [0, 1, 2]}, PIECES), "x", stop="STOP", max_tokens=3)
    assert (output.text, output.finish_reason, output.stop_reason) == ("abc", "stop", "STOP")


def test_text_held_back_comes_out_at_the_end() -> None:
    output = run(make_engine({"x": [0, 1, 2]}, PIECES), "x", stop="STOP", max_tokens=2)
    assert (output.text, output.finish_reason) == ("abcST", "length")


def test_a_stop_token_is_no_part_of_the_text() -> None:
    scripts = {"x": [0, 3, 0]}
    output = run(make_engine(scripts, PIECES), "x", stop_token_ids=[3])
    assert (output.text, output.token_ids) == ("ab", [0, 3])
    output = run(
        make_engine(scripts, PIECES), "x", stop_token_ids=[3], include_stop_str_in_output=True
    )
    assert (output.text, output.token_ids) == ("abfg", [0, 3])


def test_a36_characters_split_over_tokens() -> None:
    cjk, emoji = "世".encode(), "😀".encode()
    tokenizer = byte_level(cjk[:1], cjk[1:], emoji[:2], emoji[2:3], emoji[3:], b"a")
    engine = make_engine({"x": [5, 0, 1, 2, 3, 4, 5, 0]}, tokenizer)
    output = engine.add_request("x", [5], SamplingParams(max_tokens=8))
    seen = []
    while engine.has_unfinished:
        engine.step()
        seen.append(output.text)
    assert seen[:-1] == ["a", "a", "a世", "a世", "a世", "a世😀", "a世😀a"]
    # The last byte begins a character that never comes.
    assert seen[-1] == "a世😀a\ufffd" == tokenizer.decode(output.token_ids)


def test_a32_an_id_in_use_is_refused_and_free_again_afterwards() -> None:
    engine = make_engine({"x": [5, 6, EOS]})
    first = engine.add_request("x", [1], SamplingParams())
    with pytest.raises(ValueError, match="request_id is 'x'"):
        engine.add_request("x", [2], SamplingParams())
    drain(engine)
    assert (first.token_ids, first.finish_reason) == ([5, 6, EOS], "stop")
    assert run(engine, "x").token_ids == [5, 6, EOS]


def test_a32_an_id_is_free_while_an_aborted_request_is_still_in_flight() -> None:
    engine = make_engine({"x": [5, 6, EOS]}, steps_in_flight=3)
    first = engine.add_request("x", [1], SamplingParams())
    engine.step()
    engine.step()
    assert engine.abort("x")
    second = engine.add_request("x", [2, 3], SamplingParams())
    drain(engine)
    assert (first.token_ids, first.finish_reason) == ([], "abort")
    assert (second.token_ids, second.finish_reason) == ([5, 6, EOS], "stop")


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ([], ValueError, "prompt of request 'bad' is empty"),
        (list(range(41)), ValueError, "41 tokens long, must be at most 40"),
        ([1, VOCAB_SIZE], ValueError, "prompt holds token id 100, must be below vocab_size=100"),
        ([1, -1], ValueError, r"prompt\[1\] is -1"),
        ([1, "a"], TypeError, r"prompt\[1\] is 'a'"),
        ("text", ValueError, "must be token ids: there is no tokenizer"),
    ],
    ids=["empty", "too long", "beyond the vocabulary", "negative", "no int", "text"],
)
def test_a_bad_prompt_is_refused_and_leaves_the_others_alone(
    prompt: object, error: type[Exception], message: str
) -> None:
    engine = make_engine({"x": [5, EOS]})
    good = engine.add_request("x", [1], SamplingParams())
    with pytest.raises(error, match=message):
        engine.add_request("bad", prompt, SamplingParams())  # type: ignore[arg-type]
    engine.check()
    drain(engine)
    assert good.token_ids == [5, EOS]


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(ValueError, match="stop is"):
        run(make_engine({}), "x", stop="a")


@pytest.mark.parametrize(
    ("length", "num_tokens"),
    [(39, 1), (40, 0)],  # of a context of 40
)
def test_a35_prompts_that_reach_the_context(length: int, num_tokens: int) -> None:
    engine = make_engine({"x": [5, 6, 7, 8, 9]})
    output = engine.add_request("x", [1] * length, SamplingParams(max_tokens=5))
    drain(engine)
    assert output.token_ids == [5, 6, 7, 8, 9][:num_tokens]
    assert output.finish_reason == "length"


def test_a28_larger_than_the_whole_cache() -> None:
    # 4 pages of 4 are 16 slots.
    engine = make_engine({"long": list(range(20)), "x": [5, EOS]}, num_pages=4)
    with pytest.raises(ValueError, match="17 tokens long, must be at most 16"):
        engine.add_request("never", [1] * 17, SamplingParams())
    long = engine.add_request("long", [1] * 10, SamplingParams(max_tokens=20))
    other = engine.add_request("x", [1] * 3, SamplingParams())
    drain(engine)
    assert (long.token_ids, long.finish_reason) == (list(range(6)), "length")
    assert (other.token_ids, other.finish_reason) == ([5, EOS], "stop")


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("steps_before", [0, 1, 3])
def test_abort(steps_before: int, steps_in_flight: int) -> None:
    scripts = {"x": list(range(20)), "y": list(range(20, 40))}
    engine = make_engine(scripts, steps_in_flight=steps_in_flight)
    output = engine.add_request("x", [1, 2, 3], SamplingParams(max_tokens=15))
    other = engine.add_request("y", [1, 2, 3], SamplingParams(max_tokens=15))
    for _ in range(steps_before):
        engine.step()
    num_tokens = len(output.token_ids)
    assert engine.abort("x")
    engine.check()
    assert output.finish_reason == "abort"
    drain(engine)
    assert output.token_ids == list(range(num_tokens))
    assert other.token_ids == list(range(20, 35))
    assert not engine.abort("x")
    assert not engine.abort("unknown")


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
@pytest.mark.parametrize("late", [False, True], ids=["at launch", "when read"])
def test_a_failing_step_fails_its_requests_only(
    late: bool, steps_in_flight: int, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(
        {"x": [5, 6, 7, 8, EOS], "y": [5, 6, EOS]},
        steps_in_flight=steps_in_flight,
        failures={2: RuntimeError("out of luck")},
        late=late,
        max_num_seqs=1,  # y waits meanwhile
    )
    failed = engine.add_request("x", [1], SamplingParams())
    waiting = engine.add_request("y", [1], SamplingParams())
    with caplog.at_level(logging.CRITICAL):
        drain(engine)
    assert failed.finish_reason == "error"
    assert failed.error == "the step failed: RuntimeError: out of luck"
    assert failed.token_ids == [5, 6]
    assert (waiting.token_ids, waiting.finish_reason) == ([5, 6, EOS], "stop")


@pytest.mark.parametrize("late", [False, True], ids=["at launch", "when read"])
def test_an_interrupted_step_is_raised_and_leaves_the_engine_whole(
    late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(
        {"x": [5, 6, EOS]}, failures={1: KeyboardInterrupt()}, late=late, steps_in_flight=2
    )
    output = engine.add_request("x", [1], SamplingParams())
    with caplog.at_level(logging.CRITICAL), pytest.raises(KeyboardInterrupt):
        drain(engine)
    assert (output.token_ids, output.finish_reason) == ([5], "error")
    drain(engine)
    assert run(engine, "x").token_ids == [5, 6, EOS]


def test_a_step_returns_the_outputs_that_it_changed() -> None:
    engine = make_engine({"x": [5, EOS], "y": [6, 6, 6]}, max_prefill_chunk=2)
    assert engine.step() == []
    x = engine.add_request("x", [1], SamplingParams())
    y = engine.add_request("y", [1, 2, 3], SamplingParams(max_tokens=2))
    assert engine.step() == [x]  # y has one more token of its prompt to compute
    assert engine.step() == [x, y]
    assert engine.step() == [y]
    assert engine.step() == []


def test_metrics_and_stats() -> None:
    engine = make_engine({"x": [5, 6, EOS]})
    output = engine.add_request("x", [1, 2, 3], SamplingParams())
    assert engine.stats().num_waiting == 1
    assert output.metrics.time_to_first_token is None
    engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_pages) == (1, 0, 1)
    drain(engine)
    metrics = output.metrics
    assert metrics.first_token_time is not None
    assert metrics.finished_time is not None
    assert metrics.arrival_time <= metrics.first_token_time <= metrics.finished_time
    assert output.tokens_per_second == 2 / (metrics.finished_time - metrics.first_token_time)
    # 3 of the prompt, 2 of the output: the last is not computed.
    assert (engine.stats().num_steps, engine.stats().num_computed_tokens) == (3, 5)
