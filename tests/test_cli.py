"""The command line, called in this process, except where what is missing must be missing."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from echokernels import cli
from echokernels._target import INTERPRETED
from echokernels.runtime import LLM, SamplingParams
from echokernels.runtime.llm import TextStream
from tests.tiny_llama import save, tiny_llama

pytestmark = pytest.mark.skipif(INTERPRETED, reason="minutes in the interpreter")

MAX_TOKENS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_llama(), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, device="cpu", num_pages=64)


def run(monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    """The exit code of `echokernels ARGS`."""
    monkeypatch.setattr(sys, "argv", ["echokernels", *map(str, args)])
    with pytest.raises(SystemExit) as exit_info:
        cli.main()
    code = exit_info.value.code
    assert isinstance(code, int)
    return code


def answer(llm: LLM, *contents: str, **params: object) -> str:
    """The greedy answer to a conversation in which the user and the assistant take turns."""
    roles = ["user", "assistant"] * len(contents)
    messages = [
        {"role": role, "content": content} for role, content in zip(roles, contents, strict=False)
    ]
    sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, **params)  # type: ignore[arg-type]
    return llm.chat(messages, sampling)[0].text


def test_generate_prints_the_answer_and_its_metrics(
    folder: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ("--model", folder, "--device", "cpu", "--max-tokens", MAX_TOKENS)
    assert run(monkeypatch, "generate", "Hi", *args) == 0
    out, err = capsys.readouterr()
    expected = answer(llm, "Hi")
    assert out == expected + "\n"
    assert "tokens/s" in err
    assert "first token after" in err
    assert "cpu float32" in err

    assert run(monkeypatch, "generate", "Hi", "--raw", *args) == 0
    sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    raw = llm.generate("Hi", sampling)[0].text
    assert capsys.readouterr().out == raw + "\n"
    assert raw != expected

    stop = expected[3:5]
    assert run(monkeypatch, "generate", "Hi", "--stop", stop, *args) == 0
    assert capsys.readouterr().out == expected[: expected.index(stop)] + "\n"


def test_generate_passes_the_sampling_options_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(
        LLM, "stream_chat", lambda _llm, _messages, params: seen.append(params) or 1 / 0
    )
    options = "--temperature 0.5 --top-k 7 --top-p 0.9 --min-p 0.1 --seed 3 --max-tokens 5"
    args = (*options.split(), "--stop", "a", "--stop", "b", "--ignore-eos")
    with pytest.raises(ZeroDivisionError):
        run(monkeypatch, "generate", "Hi", "--model", folder, *args)
    assert seen == [
        SamplingParams(
            temperature=0.5,
            top_k=7,
            top_p=0.9,
            min_p=0.1,
            seed=3,
            max_tokens=5,
            stop=("a", "b"),
            ignore_eos=True,
        )
    ]


def test_the_kv_cache_dtype_is_passed_on_and_told(
    folder: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quantised = LLM(folder, device="cpu", num_pages=64, kv_cache_dtype="int8")
    question = "A longer question, then?"
    expected = answer(quantised, question)
    assert expected != answer(llm, question)
    args = ("--model", folder, "--device", "cpu", "--max-tokens", MAX_TOKENS)
    args += ("--kv-cache-dtype", "int8")
    assert run(monkeypatch, "generate", question, *args) == 0
    out, err = capsys.readouterr()
    assert out == expected + "\n"
    assert "cpu float32 | int8 KV cache" in err
    monkeypatch.setattr(sys, "stdin", io.StringIO(question))
    assert run(monkeypatch, "chat", *args) == 0
    assert capsys.readouterr().out == expected + "\n"


def test_demo_finds_its_model_and_tells_the_ops(
    folder: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("echokernels.runtime.demo_model.find_demo_model", lambda: folder)
    assert (
        run(monkeypatch, "generate", "--demo", "--max-tokens", MAX_TOKENS, "--device", "cpu") == 0
    )
    out, err = capsys.readouterr()
    assert out == answer(llm, "What is the capital of France?") + "\n"
    ops = {op.strip(" ,") for op in err.split("ops:")[1].split()}
    assert ops == {
        f"echo::{op}"
        for op in (
            "rms_norm",
            "fused_add_rms_norm",
            "fused_qk_norm_rope_cache",
            "flash_attn_varlen",
            "paged_attention",
            "silu_and_mul",
            "sample",
        )
    }


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("generate", "Hi", "--model", "/no/such/model"), 1, "error: model path '/no/such/model'"),
        (("generate", "Hi"), 2, "give either a path or --demo"),
        (("generate", "Hi", "--demo", "--model", "x"), 2, "give either a path or --demo"),
        (("generate", "--model", "x"), 2, "PROMPT"),
        (("generate", "Hi", "--demo", "--top-p", "2"), 1, "error: top_p is 2.0"),
        (
            ("generate", "Hi", "--demo", "--kv-cache-dtype", "int4"),
            1,
            "error: kv_cache_dtype is 'int4', must be one of auto, int8, fp8",
        ),
        (("generate", "Hi", "--nonsense"), 2, "--nonsense"),
        (("nonsense",), 2, "nonsense"),
    ],
)
def test_errors_of_the_user_are_one_line_and_no_traceback(
    args: tuple[str, ...],
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, *args) == code
    out, err = capsys.readouterr()
    assert message in err
    assert "Traceback" not in err
    assert out == ""
    if code == 1:
        assert len(err.splitlines()) == 1


def test_ctrl_c_ends_an_answer_between_two_steps(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    next_piece = TextStream.__next__

    def interrupted(stream: TextStream) -> str:
        if len(stream.output.token_ids) == 2:
            signal.raise_signal(signal.SIGINT)
        return next_piece(stream)

    monkeypatch.setattr(TextStream, "__next__", interrupted)
    before = signal.getsignal(signal.SIGINT)
    code = run(monkeypatch, "generate", "Hi", "--model", folder, "--ignore-eos", "--device", "cpu")
    assert code == cli.EXIT_INTERRUPTED
    assert signal.getsignal(signal.SIGINT) is before
    assert "(abort)" in capsys.readouterr().err


def chat(monkeypatch: pytest.MonkeyPatch, folder: Path, lines: str, *args: object) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    options = ("--model", folder, "--device", "cpu", "--max-tokens", MAX_TOKENS)
    return run(monkeypatch, "chat", *options, *args)


def test_chat_remembers_and_ends_with_its_input(
    folder: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # An empty line is no turn, and the last one need not end with a newline.
    assert chat(monkeypatch, folder, "Hi\n\nWhy?") == 0
    first = answer(llm, "Hi")
    second = answer(llm, "Hi", first, "Why?")
    assert capsys.readouterr().out == f"{first}\n{second}\n"
    assert second != answer(llm, "Why?")
    assert chat(monkeypatch, folder, "") == 0


def test_chat_goes_on_after_a_turn_that_does_not_fit(
    folder: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(monkeypatch, folder, f"{'x' * 50}\nHi\n", "--max-model-len", 40) == 0
    out, err = capsys.readouterr()
    assert out == answer(llm, "Hi") + "\n"
    assert "52 tokens long, must be at most 40" in err


def test_info(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "info") == 0
    out = capsys.readouterr().out
    for name in ("torch", "triton", "echo::paged_attention", "PyTorch references"):
        assert name in out


def test_without_the_extras_it_tells_what_to_install() -> None:
    script = "import sys; sys.modules['typer'] = None; import echokernels.cli"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 1
    assert "pip install 'echokernels[runtime]'" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_missing_package_of_one_format_is_told_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.delitem(sys.modules, "echokernels.runtime.hf_checkpoint", raising=False)
    assert run(monkeypatch, "generate", "Hi", "--model", folder) == 1
    assert "pip install 'echokernels[runtime]'" in capsys.readouterr().err
