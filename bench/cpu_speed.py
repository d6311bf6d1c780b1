"""The runtime on one CPU thread, fp32: `python -m bench.cpu_speed`.

How fast is a single request beside transformers' `generate` on the same weights, and how much
faster are 16 requests together than one by one? Greedy decoding of a fixed number of tokens. The
runs interleave and each figure is a median. There is none where two disagree about a token.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from bench.results import OURS, ResultsFile, Row, provenance
from echokernels.runtime import LLM, SamplingParams
from echokernels.runtime.checkpoint import open_checkpoint
from echokernels.runtime.demo_model import find_demo_model

Tokens = list[list[int]]
PROMPTS = [
    f"{question} {thing}?"
    for question in ("What is", "Who was the first to see", "Why do people like", "How big is")
    for thing in ("the moon", "a blue whale", "a steam engine", "the North Pole")
]


@dataclass
class Contender:
    """`run()` generates and returns the output tokens of every prompt. `expected` must be equal."""

    case: str
    impl: str
    run: Callable[[], Tokens]
    seconds: list[float] = field(default_factory=list)
    tokens: Tokens = field(default_factory=list)

    def measure(self) -> None:
        start = time.perf_counter()
        self.tokens = self.run()
        self.seconds.append(time.perf_counter() - start)

    @property
    def rate(self) -> float:
        """Output tokens per second."""
        return sum(map(len, self.tokens)) / statistics.median(self.seconds)


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    pairs = _contenders(args.model or find_demo_model(), args.tokens)
    console = Console()
    _measure([contender for pair in pairs for contender in pair], args.rounds, console)
    rows = [row for pair in pairs for row in _compare(*pair)]
    ResultsFile(args.out, provenance(torch.device("cpu"))).write(rows)
    for row in rows:
        speed = "" if row.rate is None else f"{row.rate:.1f} {row.unit}"
        console.print(f"{row.case}, {row.impl}: {speed} {row.note}", highlight=False)
    return int(not all(row.ok for row in rows))


def _contenders(model: Path, num_tokens: int) -> list[tuple[Contender, Contender]]:
    """Pairs of (the one in question, what it is compared with)."""
    llm = LLM(model, dtype="float32", device="cpu")
    reference = transformers_model(model)
    prompts = [_token_ids(llm, prompt) for prompt in PROMPTS]
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)

    def ours(batch: Tokens) -> Tokens:
        return [output.token_ids for output in llm.generate(batch, params, progress=False)]

    def theirs(prompt: list[int]) -> Tokens:
        ids = torch.tensor([prompt])
        output = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return [output[0, len(prompt) :].tolist()]

    one, many = "1 prompt", f"{len(prompts)} prompts"
    return [
        (
            Contender(one, OURS, lambda: ours(prompts[:1])),
            Contender(one, "transformers", lambda: theirs(prompts[0])),
        ),
        (
            Contender(many, f"{OURS}-together", lambda: ours(prompts)),
            Contender(many, f"{OURS}-one-by-one", lambda: [ours([p])[0] for p in prompts]),
        ),
    ]


def _measure(contenders: list[Contender], rounds: int, console: Console) -> None:
    with Progress(console=console) as progress:
        task = progress.add_task("", total=rounds * len(contenders))
        for _ in range(rounds):
            for contender in contenders:
                progress.update(task, description=f"{contender.case}, {contender.impl}")
                contender.measure()
                progress.advance(task)


def _compare(first: Contender, second: Contender) -> list[Row]:
    same = first.tokens == second.tokens
    note = f"{first.rate / second.rate:.2f}x {second.impl}" if same else "wrong: tokens differ"
    return [
        Row(
            "generate",
            contender.case,
            contender.impl,
            rate=contender.rate if same else None,
            unit="tokens/s",
            ok=same,
            note=note if contender is first else "",
        )
        for contender in (first, second)
    ]


def _token_ids(llm: LLM, prompt: str) -> list[int]:
    if llm.tokenizer is None:
        raise ValueError("model has no tokenizer, must have one: the prompts are text")
    return llm.tokenizer.encode(prompt)


def transformers_model(path: Path) -> Any:
    """transformers' Llama with the weights that our own loader reads from `path`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    checkpoint = open_checkpoint(path)
    c = checkpoint.config
    config = LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        rms_norm_eps=c.rms_norm_eps,
        rope_parameters={
            "rope_type": "default",
            **(c.rope_scaling or {}),
            "rope_theta": c.rope_theta,
        },
        max_position_embeddings=c.max_position_embeddings,
        tie_word_embeddings=c.tie_word_embeddings,
        attention_bias=c.attention_bias,
        mlp_bias=c.mlp_bias,
    )
    model = LlamaForCausalLM(config).float().eval()
    missing, unexpected = model.load_state_dict(dict(checkpoint.tensors()), strict=False)
    tied = {"lm_head.weight"} if c.tie_word_embeddings else set()
    if unexpected or set(missing) - tied:
        raise ValueError(f"{path}: tensors missing {missing}, unexpected {unexpected}")
    return model


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.cpu_speed", description=__doc__)
    parser.add_argument("--model", type=Path, help="default: the demo model, SmolLM2-135M-Instruct")
    parser.add_argument("--tokens", type=int, default=32, help="output tokens of each prompt")
    parser.add_argument("--rounds", type=int, default=3, help="times that everything is run")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "cpu-speed.csv"
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
