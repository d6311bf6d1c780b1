"""The front end on a tiny random Llama: all forms of prompts, streams, bad requests among good."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from echokernels._target import INTERPRETED
from echokernels.runtime import LLM, SamplingParams
from tests.tiny_llama import greedy, save, tiny_llama

pytestmark = pytest.mark.skipif(INTERPRETED, reason="minutes in the interpreter")

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPTS = [[5, 6, 7], [9], [10, 20, 30, 40, 50]]
PAGES = {"page_size": 4, "num_pages": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_llama(), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    model = tiny_llama()
    return [greedy(model, prompt, 8) for prompt in PROMPTS]


@pytest.fixture
def llm(folder: Path) -> LLM:
    return LLM(folder, device="cpu", **PAGES)


def assert_idle(llm: LLM) -> None:
    llm.engine.check()
    assert not llm.engine.has_unfinished
    assert llm.engine.stats().num_used_pages == 0


def test_prompts_as_ids_or_text_one_or_many(llm: LLM, expected: list[list[int]]) -> None:
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == expected
    assert [output.finish_reason for output in outputs] == ["length"] * 3
    assert [output.prompt_token_ids for output in outputs] == PROMPTS
    [single] = llm.generate(PROMPTS[0], GREEDY)
    assert single.token_ids == expected[0]
    assert llm.tokenizer is not None
    text = llm.tokenizer.decode(PROMPTS[0])
    assert llm.tokenizer.encode(text) == PROMPTS[0]
    [from_text] = llm.generate(text, GREEDY)
    assert (from_text.token_ids, from_text.prompt) == (expected[0], text)
    assert from_text.text == llm.tokenizer.decode(expected[0])
    mixed = llm.generate([text, PROMPTS[1]], GREEDY)
    assert [output.token_ids for output in mixed] == expected[:2]
    assert llm.generate([], GREEDY) == []
    assert_idle(llm)


def test_arguments_of_a_wrong_kind(llm: LLM) -> None:
    with pytest.raises(TypeError, match="prompts is 5, must be text, token ids"):
        llm.generate(5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="messages is 5, must be a list of messages"):
        llm.chat(5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"params is .*top_k.*, must be SamplingParams"):
        llm.stream([1], {"top_k": 1})  # type: ignore[arg-type]
    assert_idle(llm)


def test_one_set_of_parameters_for_each_prompt(llm: LLM, expected: list[list[int]]) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (1, 8, 3)]
    outputs = llm.generate(PROMPTS, params)
    assert [output.token_ids for output in outputs] == [
        ids[:n] for ids, n in zip(expected, (1, 8, 3), strict=True)
    ]
    with pytest.raises(ValueError, match=r"sampling_params are 2, must be one, or .*: 3"):
        llm.generate(PROMPTS, params[:2])
    with pytest.raises(TypeError, match=r"sampling_params\[1\] is None"):
        llm.generate(PROMPTS, [GREEDY, None, GREEDY])  # type: ignore[list-item]


def test_bad_requests_among_good_ones(llm: LLM, expected: list[list[int]]) -> None:
    """Each gets its own error; the others and the next call are not affected."""
    prompts = [PROMPTS[0], [], [1] * 257, PROMPTS[1], [1, 128], None, "é", PROMPTS[2]]
    outputs = llm.generate(prompts, GREEDY)  # type: ignore[arg-type]
    good = [outputs[0], outputs[3], outputs[7]]
    assert [output.token_ids for output in good] == expected
    messages = ["is empty", "must be at most 256", "token id 128", "prompt is None", "is empty"]
    bad = [outputs[1], outputs[2], *outputs[4:7]]
    for output, message in zip(bad, messages, strict=True):
        assert output.finish_reason == "error"
        assert output.error is not None
        assert message in output.error
        assert (output.token_ids, output.text) == ([], "")
    assert llm.generate(PROMPTS[0], GREEDY)[0].token_ids == expected[0]
    assert_idle(llm)


@pytest.mark.parametrize(
    ("length", "num_tokens", "reason"), [(15, 1, "length"), (16, 0, "length"), (17, 0, "error")]
)
def test_a35_prompts_around_the_context(
    folder: Path, length: int, num_tokens: int, reason: str
) -> None:
    llm = LLM(folder, device="cpu", max_model_len=16, **PAGES)
    [output] = llm.generate([1] * length, SamplingParams(max_tokens=5, ignore_eos=True))
    assert len(output.token_ids) == num_tokens
    assert output.finish_reason == reason
    assert_idle(llm)


def test_a28_a_request_larger_than_the_cache_fails_alone(
    folder: Path, expected: list[list[int]]
) -> None:
    llm = LLM(folder, device="cpu", page_size=4, num_pages=4)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    too_long, long, good = llm.generate([[1] * 17, [1] * 10, PROMPTS[0]], params)
    assert too_long.finish_reason == "error"
    assert (long.finish_reason, len(long.token_ids)) == ("length", 6)
    assert (good.finish_reason, good.token_ids[:8]) == ("length", expected[0])
    assert_idle(llm)


def test_a25_the_same_prompt_twice(llm: LLM) -> None:
    # 8 tokens fill two pages of 4 exactly.
    first, second = (llm.generate([*range(3, 11)], GREEDY)[0] for _ in range(2))
    assert first.token_ids == second.token_ids
    assert_idle(llm)


def test_a26_pages_that_others_have_used_since(folder: Path) -> None:
    # 3 pages of 4: each of the two requests needs all of them.
    llm = LLM(folder, device="cpu", page_size=4, num_pages=3)
    x, y = [3, 4, 5, 6], [60, 61, 62, 63]
    cold = llm.generate(x, GREEDY)[0].token_ids
    assert llm.generate(y, GREEDY)[0].token_ids != cold
    assert llm.generate(x, GREEDY)[0].token_ids == cold
    assert_idle(llm)


def test_a34_a_seed_holds_in_any_batch(llm: LLM) -> None:
    prompt = PROMPTS[2]
    seeded = SamplingParams(temperature=0.8, seed=42, max_tokens=8, ignore_eos=True)
    other = SamplingParams(temperature=0.8, seed=43, max_tokens=8, ignore_eos=True)
    free = SamplingParams(temperature=0.8, max_tokens=8, ignore_eos=True)
    alone = llm.generate(prompt, seeded)[0].token_ids
    drawn = []
    for _ in range(4):
        for position, order in enumerate(([seeded, free], [free, seeded])):
            outputs = llm.generate([prompt] * 2, order)
            assert outputs[position].token_ids == alone
            drawn.append(tuple(outputs[1 - position].token_ids))
    assert len(set(drawn)) > 1, "requests without a seed all drew the same"
    assert llm.generate(prompt, other)[0].token_ids != alone


@pytest.mark.parametrize("temperature", [1e-4, 1e-5, 1e-6, 0.0])
def test_a34_tiny_temperatures_are_greedy(
    llm: LLM, expected: list[list[int]], temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=8, ignore_eos=True)
    assert [output.token_ids for output in llm.generate(PROMPTS, params)] == expected


def test_the_engine_seed_makes_unseeded_requests_reproducible(folder: Path) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True)

    def run(seed: int) -> list[list[int]]:
        llm = LLM(folder, device="cpu", seed=seed, **PAGES)
        return [output.token_ids for output in llm.generate([PROMPTS[0]] * 3, params)]

    first = run(1)
    assert run(1) == first
    assert run(2) != first
    assert len({tuple(ids) for ids in first}) > 1, "every request of a batch drew the same"


def test_chat_applies_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    [output] = llm.chat(messages, GREEDY)
    assert output.prompt == "<|user|>Hi<|bot|>"
    # One id for each special token, and no other special token before them.
    assert llm.tokenizer is not None
    assert output.prompt_token_ids == [1, *llm.tokenizer.encode("Hi"), 2]
    outputs = llm.chat([messages, [{"role": "user"}], messages], GREEDY)  # type: ignore[list-item]
    assert outputs[0].token_ids == outputs[2].token_ids == output.token_ids
    assert outputs[1].error == "messages[0]['content'] is None; it must be a string"
    assert "".join(llm.stream_chat(messages, GREEDY)) == output.text


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_stream_joins_to_the_text(folder: Path, steps_in_flight: int) -> None:
    llm = LLM(folder, device="cpu", max_steps_in_flight=steps_in_flight, **PAGES)
    [whole] = llm.generate(PROMPTS[0], GREEDY)
    stream = llm.stream(PROMPTS[0], GREEDY)
    pieces = list(stream)
    assert "".join(pieces) == whole.text
    assert len(pieces) > 1
    assert all(pieces)
    assert stream.output.token_ids == whole.token_ids
    assert stream.output.finish_reason == "length"
    assert_idle(llm)


def test_a_stream_raises_for_a_bad_prompt_and_for_a_failed_step(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="is empty"):
        llm.stream([])
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)

    def fail(_batch: object) -> None:
        raise RuntimeError("no more memory")

    monkeypatch.setattr(llm.engine.runner, "execute", fail)
    with pytest.raises(RuntimeError, match="the step failed: RuntimeError: no more memory"):
        list(stream)
    assert_idle(llm)


@pytest.mark.parametrize("how", ["close", "drop"])
def test_a31_a_stream_given_up_leaves_the_engine(
    llm: LLM, expected: list[list[int]], how: str
) -> None:
    stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=100, ignore_eos=True))
    other = llm.engine.add_request("other", PROMPTS[1], GREEDY)
    next(stream)
    output = stream.output
    if how == "close":
        stream.close()
        assert list(stream) == []
    else:
        del stream
        gc.collect()
    assert output.finish_reason == "abort"
    while llm.engine.has_unfinished:
        llm.engine.step()
    assert other.token_ids == expected[1]
    assert_idle(llm)


def test_an_interrupt_leaves_nothing_behind(
    llm: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY)
    assert_idle(llm)
    assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == expected


def test_without_a_tokenizer_ids_go_in_and_out(tmp_path: Path, expected: list[list[int]]) -> None:
    save(tiny_llama(), tmp_path, tokenizer=False)
    llm = LLM(tmp_path, device="cpu", **PAGES)
    ids, text = llm.generate([PROMPTS[0], "text"], GREEDY)
    assert (ids.token_ids, ids.text) == (expected[0], "")
    assert text.error is not None
    assert "there is no tokenizer" in text.error
    assert "this model has none" in str(llm.chat([{"role": "user", "content": "Hi"}])[0].error)


def test_dummy_weights_need_only_a_configuration(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())

    def run(seed: int) -> list[int]:
        llm = LLM(tmp_path, device="cpu", load_format="dummy", seed=seed, **PAGES)
        return llm.generate(PROMPTS[0], GREEDY)[0].token_ids

    assert run(3) == run(3)
    assert run(3) != run(4)
    with pytest.raises(ValueError, match="found no weights"):
        LLM(tmp_path, device="cpu")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"page_sizes": 16},
            TypeError,
            "page_sizes is not an engine option, must be one of .*page",
        ),
        ({"page_size": 0}, ValueError, "page_size is 0"),
        (
            {"max_model_len": 257},
            ValueError,
            "max_model_len is 257, must be at most 256, the model",
        ),
        (
            {"kv_cache_dtype": "int4"},
            ValueError,
            "kv_cache_dtype is 'int4', must be one of auto, int8, fp8",
        ),
        ({"load_format": "pickle"}, ValueError, "load_format is 'pickle', must be one of auto"),
        ({"dtype": "int8"}, ValueError, "dtype is 'int8', must be auto, float32"),
        ({"device": "tpu9"}, ValueError, "device is 'tpu9', must be auto, cpu"),
        ({"device": "meta"}, ValueError, "device is 'meta', must be cpu or one of"),
        ({"max_steps_in_flight": 0}, ValueError, "max_steps_in_flight is 0"),
    ],
)
def test_bad_options(
    folder: Path, options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        LLM(folder, **({"device": "cpu"} | options))  # type: ignore[arg-type]


def test_a_missing_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="found nothing there"):
        LLM(tmp_path / "missing")


def test_auto_is_float32_on_a_cpu_and_other_types_run(folder: Path) -> None:
    assert LLM(folder, device="cpu", **PAGES).engine.runner.place.dtype == torch.float32
    llm = LLM(folder, device="cpu", dtype=torch.bfloat16, **PAGES)
    assert llm.engine.runner.place.dtype == torch.bfloat16
    assert len(llm.generate(PROMPTS[0], GREEDY)[0].token_ids) == 8


@pytest.mark.gpu
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_gpu_pages_come_from_free_memory(
    folder: Path, cuda: torch.device, kv_cache_dtype: str
) -> None:
    # A tiny model gets as many pages as it can use: 256 sequences of 256 tokens.
    llm = LLM(folder, device=cuda, kv_cache_dtype=kv_cache_dtype)
    assert llm.engine.runner.num_pages == 256 * 256 // 16
    assert llm.engine.runner.place.dtype == torch.float32  # the checkpoint's
    assert len(llm.generate(PROMPTS[0], GREEDY)[0].token_ids) == 8
    with pytest.raises(ValueError, match="0 bytes are left for the KV cache"):
        LLM(folder, device=cuda, gpu_memory_utilization=0.0)
    with pytest.raises(ValueError, match=r"gpu_memory_utilization is 1\.5"):
        LLM(folder, device=cuda, gpu_memory_utilization=1.5)
