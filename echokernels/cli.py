"""The command line: `echokernels generate | chat | calibrate | info`.

Answers go to stdout, everything about them to stderr. An error of the user's is one red line and
exit code 1; a wrong option is exit code 2.
"""

from __future__ import annotations

import importlib.metadata
import platform
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

INSTALL_HINT = "run  pip install 'echokernels[runtime]'  for what the command line needs"

try:
    import typer
    from rich.console import Console
    from rich.markup import escape
except ImportError as error:
    raise SystemExit(f"error: {error}; {INSTALL_HINT}") from None

if TYPE_CHECKING:
    from echokernels.runtime import LLM, RequestOutput
    from echokernels.runtime.llm import TextStream

DEMO_PROMPT = "What is the capital of France?"
EXIT_INTERRUPTED = 130  # the shell's code for a program that Ctrl-C ended

app = typer.Typer(
    help="LLM inference kernels in pure Python, and a small runtime on top of them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
notes = Console(stderr=True, highlight=False)

ModelOption = Annotated[
    Path | None, typer.Option("--model", "-m", help="A Hugging Face folder or a .gguf file.")
]
DemoOption = Annotated[bool, typer.Option("--demo", help="Use the small model of `make demo`.")]
TemperatureOption = Annotated[float, typer.Option(help="0 takes the most likely token.")]
TopKOption = Annotated[int, typer.Option(help="Keep the k most likely tokens; 0 keeps all.")]
TopPOption = Annotated[float, typer.Option(help="Keep the likeliest tokens of this total share.")]
MinPOption = Annotated[float, typer.Option(help="Drop tokens below this share of the likeliest.")]
SeedOption = Annotated[int | None, typer.Option(help="Makes the draws reproducible.")]
MaxTokensOption = Annotated[int, typer.Option(help="Most tokens of an answer.")]
StopOption = Annotated[list[str] | None, typer.Option(help="Text that ends an answer; repeatable.")]
DtypeOption = Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16.")]
KVCacheDtypeOption = Annotated[
    str, typer.Option(help="auto (the model's), int8 or fp8: what the KV cache holds.")
]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
MaxModelLenOption = Annotated[
    int | None,
    typer.Option(help="Most tokens of prompt and answer; the model's own limit if absent."),
]


@app.command()
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The text to answer or to go on from.")
    ] = None,
    model: ModelOption = None,
    demo: DemoOption = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Do not lay the prompt out as a chat message.")
    ] = False,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    min_p: MinPOption = 0.0,
    seed: SeedOption = None,
    max_tokens: MaxTokensOption = 256,
    stop: StopOption = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on to max_tokens.")] = False,
    dtype: DtypeOption = "auto",
    kv_cache_dtype: KVCacheDtypeOption = "auto",
    device: DeviceOption = "auto",
    max_model_len: MaxModelLenOption = None,
) -> None:
    """Answer one prompt, printed as it is made.

    A model with a chat template gets the prompt as a user's message, unless --raw.
    """
    from echokernels.runtime import SamplingParams

    if prompt is None:
        if not demo:
            raise typer.BadParameter("is missing", param_hint="PROMPT")
        prompt = DEMO_PROMPT
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        max_tokens=max_tokens,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
    )
    llm = _load(
        model,
        demo,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        device=device,
        max_model_len=max_model_len,
    )
    ops = _record_ops(llm) if demo else None
    if raw or llm.tokenizer is None or llm.tokenizer.chat_template is None:
        stream = llm.stream(prompt, params)
    else:
        stream = llm.stream_chat([{"role": "user", "content": prompt}], params)
    interrupted = _print_stream(stream)
    _print_metrics(llm, stream.output)
    if ops is not None:
        names = ", ".join(f"echo::{op}" for op in ops)
        notes.print(f"[dim]ops: {names}[/]", soft_wrap=True)
    if interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)


@app.command()
def chat(
    model: ModelOption = None,
    demo: DemoOption = False,
    system: Annotated[str | None, typer.Option(help="A first message that sets the tone.")] = None,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    min_p: MinPOption = 0.0,
    seed: SeedOption = None,
    max_tokens: MaxTokensOption = 512,
    dtype: DtypeOption = "auto",
    kv_cache_dtype: KVCacheDtypeOption = "auto",
    device: DeviceOption = "auto",
    max_model_len: MaxModelLenOption = None,
) -> None:
    """Talk with a model. One line is one turn; Ctrl-C ends an answer, Ctrl-D the conversation."""
    from echokernels.runtime import SamplingParams

    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        max_tokens=max_tokens,
    )
    llm = _load(
        model,
        demo,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        device=device,
        max_model_len=max_model_len,
    )
    messages = [] if system is None else [{"role": "system", "content": system}]
    while (line := _read_line()) is not None:
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line})
        try:
            stream = llm.stream_chat(messages, params)
        except ValueError as error:  # the conversation has outgrown the context, for instance
            messages.pop()
            _print_error(error)
            continue
        _print_stream(stream)
        messages.append({"role": "assistant", "content": stream.output.text})
        _print_metrics(llm, stream.output)


@app.command()
def calibrate() -> None:
    """Measure how decoding best shares out keys on this GPU, and keep it."""
    import torch
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from echokernels import _calibration
    from echokernels import calibrate as measured
    from echokernels.attention._sharing import forget_calibration

    if not torch.cuda.is_available():
        raise RuntimeError("calibrate needs a GPU, and PyTorch finds none")
    device = torch.device("cuda", torch.cuda.current_device())
    kinds = measured.kinds(device)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, console=notes) as progress:
        task = progress.add_task("decode", total=len(kinds))
        entries = measured.calibrate(
            kinds,
            lambda kind: measured.candidates(kind, device),
            measured.decode_us,
            lambda _: progress.advance(task),
        )
    file = _calibration.save(torch.cuda.get_device_name(device), entries)
    forget_calibration()
    for key, entry in entries.items():
        print(key, ", ".join(f"{name} {value}" for name, value in entry.items()))
    notes.print(f"kept in {escape(str(file))}")


@app.command()
def info() -> None:
    """Print versions, devices and the registered ops."""
    import torch

    import echokernels
    from echokernels._library import OPS
    from echokernels._target import INTERPRETED

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    rows = {
        "echokernels": echokernels.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
        "devices": ", ".join([*gpus, f"cpu ({torch.get_num_threads()} threads)"]),
        "on CUDA": "Triton kernels",
        "attention": ", ".join(map(_attention_path, range(len(gpus)))) or "portable Triton",
        "calibrated": ", ".join(filter(_is_calibrated, gpus)) or "no, `echokernels calibrate` does",
        "on CPU": "Triton kernels, interpreted" if INTERPRETED else "PyTorch references",
        "ops": ", ".join(f"echo::{name}" for name in sorted(OPS)),
    }
    for name, value in rows.items():
        print(f"{name:<12} {value}")


def _is_calibrated(gpu: str) -> bool:
    from echokernels import _calibration

    return bool(_calibration.load(gpu))


def _attention_path(gpu: int) -> str:
    import torch

    from echokernels._target import target_of

    hopper = target_of(torch.device("cuda", gpu)).runs_hopper_kernels
    return "Gluon for Hopper" if hopper else "portable Triton"


def main() -> None:
    try:
        app()
    except ModuleNotFoundError as error:
        _print_error(f"{error}; {INSTALL_HINT}")
        sys.exit(1)
    except (ValueError, TypeError, RuntimeError) as error:
        _print_error(error)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def _load(model: Path | None, demo: bool, **options: Any) -> LLM:
    from echokernels.runtime import LLM
    from echokernels.runtime.demo_model import find_demo_model

    if demo == (model is not None):
        raise typer.BadParameter("give either a path or --demo", param_hint="--model")
    path = find_demo_model() if model is None else model
    with notes.status(f"loading {path.name}"):
        return LLM(path, **options)


def _record_ops(llm: LLM) -> list[str]:
    """The ops of a first, short request: recording them would slow the one that is timed."""
    from echokernels.runtime import SamplingParams
    from echokernels.runtime.trace import OpTrace

    with OpTrace() as trace:
        llm.generate([[0, 0]], SamplingParams(max_tokens=2, ignore_eos=True), progress=False)
    return list(trace.calls)


def _read_line() -> str | None:
    """The user's next line; None at the end of the input."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        return None


def _print_stream(stream: TextStream) -> bool:
    """Prints the answer as it comes. True if Ctrl-C ended it."""
    interrupted = False

    def note(_signal: int, _frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True

    # Noted, and acted on between two steps, so that the engine is never left amid one.
    previous = signal.signal(signal.SIGINT, note)
    try:
        for text in stream:
            print(text, end="", flush=True)
            if interrupted:
                stream.close()
    finally:
        signal.signal(signal.SIGINT, previous)
    print()
    return interrupted


def _print_metrics(llm: LLM, output: RequestOutput) -> None:
    runner = llm.engine.runner
    place, kv_cache_dtype = runner.place, runner.config.kv_cache_dtype
    parts = [f"{len(output.token_ids)} tokens ({output.finish_reason})"]
    if output.tokens_per_second is not None:
        parts.append(f"{output.tokens_per_second:.1f} tokens/s")
    if output.metrics.time_to_first_token is not None:
        parts.append(f"first token after {output.metrics.time_to_first_token:.2f} s")
    parts.append(f"{place.device} {str(place.dtype).removeprefix('torch.')}")
    if kv_cache_dtype != "auto":
        parts.append(f"{kv_cache_dtype} KV cache")
    notes.print(f"[dim]{escape(' | '.join(parts))}[/]", soft_wrap=True)


def _print_error(error: object) -> None:
    notes.print(f"[red]error: {escape(str(error))}[/]", soft_wrap=True)


if __name__ == "__main__":
    main()
