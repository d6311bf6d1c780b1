"""What codes in the KV cache cost in quality: `python -m bench.quality TEXT --model PATH`.

Teacher forcing: of every token of a text, how likely did the model find it after those before it?
Once for each `kv_cache_dtype`. The text is cut into windows, none of which sees another. A window
is computed in chunks through a paged cache, as the engine does it, and every key is read from
there. Perplexity is e to the mean of -log p(token); top-1 agreement is the share of predictions
whose likeliest token is that of "auto".
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from bench.results import ResultsFile, Row, default_path, provenance
from echokernels.runtime.batch import pack_batch
from echokernels.runtime.cache_memory import allocate_caches, cache_place
from echokernels.runtime.config import KV_CACHE_DTYPES, ModelConfig
from echokernels.runtime.demo_model import find_demo_model
from echokernels.runtime.layers import Placement
from echokernels.runtime.loader import load_model
from echokernels.runtime.models.registry import CausalLM
from echokernels.runtime.sampling_params import SamplingParams
from echokernels.runtime.scheduler import ScheduledBatch, ScheduledSequence
from echokernels.runtime.sequence import Sequence as TokenSequence
from echokernels.runtime.tokenizer import Tokenizer, load_tokenizer

PAGE_SIZE = 16
BASELINE = "auto"


@dataclass(frozen=True)
class Predictions:
    """Of all tokens but the first of each window."""

    losses: torch.Tensor  # f64, -log p of the token that came
    likeliest: torch.Tensor  # i64, the token that was expected

    @property
    def perplexity(self) -> float:
        return math.exp(float(self.losses.mean()))


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    torch.set_grad_enabled(False)
    path = args.model or find_demo_model()
    model, config, place = load_model(path, args.dtype, args.device)
    windows = windows_of(args.text.read_text(), load_tokenizer(path), args.window)
    found = {
        kv_cache_dtype: predict(model, config, place, kv_cache_dtype, windows, args.chunk)
        for kv_cache_dtype in dict.fromkeys((BASELINE, *args.kv_cache_dtype))
    }
    dtype = str(place.dtype).removeprefix("torch.")
    rows = _rows(f"{path.name} {dtype}, {args.text.name} in windows of {args.window}", found)
    common = provenance(place.device)
    out = args.out or default_path("quality", common["gpu"], quick=False)
    ResultsFile(out, common, keep=True).write(rows)
    for row in rows:
        Console().print(f"{row.op}, {row.impl}: {row.rate:.5g} {row.note}", highlight=False)
    return 0


def windows_of(text: str, tokenizer: Tokenizer, size: int) -> list[list[int]]:
    """The tokens of `text`, `size` in each window but the last, each with what begins a text."""
    before = tokenizer.encode("")
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    step = size - len(before)
    if step < 2:
        raise ValueError(f"window is {size}, must be at least {len(before) + 2}")
    windows = [before + token_ids[start : start + step] for start in range(0, len(token_ids), step)]
    windows = [window for window in windows if len(window) > 1]
    if not windows:
        raise ValueError(f"text is {len(token_ids)} tokens long, must have one to predict")
    return windows


def predict(
    model: CausalLM,
    config: ModelConfig,
    place: Placement,
    kv_cache_dtype: str,
    windows: list[list[int]],
    chunk: int,
) -> Predictions:
    longest = max(map(len, windows))
    if longest > config.max_position_embeddings:
        raise ValueError(
            f"window is {longest}, must be at most {config.max_position_embeddings}, the model's"
        )
    losses, likeliest = [], []
    for window in windows:
        targets = torch.tensor(window[1:], device=place.device)
        for logits in logits_of(model, config, place, kv_cache_dtype, window, chunk):
            wanted, targets = targets[: len(logits)], targets[len(logits) :]
            log_p = logits[: len(wanted)].double().log_softmax(-1)  # nothing follows the last one
            losses.append(-log_p.gather(1, wanted[:, None])[:, 0].cpu())
            likeliest.append(log_p.argmax(-1).cpu())
    return Predictions(torch.cat(losses), torch.cat(likeliest))


def logits_of(
    model: CausalLM,
    config: ModelConfig,
    place: Placement,
    kv_cache_dtype: str,
    token_ids: list[int],
    chunk: int,
) -> Iterator[torch.Tensor]:
    """Logits of all tokens, [chunk, vocab_size] at a time."""
    num_pages = -(-len(token_ids) // PAGE_SIZE)
    caches = allocate_caches(config, num_pages, PAGE_SIZE, cache_place(kv_cache_dtype, place))
    seq = TokenSequence("text", token_ids, SamplingParams())
    seq.block_table = list(range(num_pages))
    for start in range(0, len(token_ids), chunk):
        count = min(chunk, len(token_ids) - start)
        batch = ScheduledBatch([ScheduledSequence(seq, start, count, samples=True)])
        inputs = pack_batch(batch, PAGE_SIZE, place.device)
        hidden = model(inputs.input_ids, inputs.positions, caches, inputs.attention)
        yield model.compute_logits(hidden)


def _rows(case: str, found: dict[str, Predictions]) -> list[Row]:
    baseline = found[BASELINE]
    count = f"of {len(baseline.losses)} tokens"
    perplexities = [
        Row("perplexity", case, impl, rate=each.perplexity, ok=True, note=count)
        for impl, each in found.items()
    ]
    agreements = [
        Row("top-1 agreement", case, impl, rate=_agreement(each, baseline), ok=True, note=count)
        for impl, each in found.items()
        if impl != BASELINE
    ]
    return perplexities + agreements


def _agreement(one: Predictions, other: Predictions) -> float:
    return float((one.likeliest == other.likeliest).double().mean())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.quality", description=__doc__)
    parser.add_argument("text", type=Path, help="a file of text, UTF-8")
    parser.add_argument("--model", type=Path, help="default: the demo model, SmolLM2-135M-Instruct")
    parser.add_argument("--dtype", default="auto", help="of the model")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--kv-cache-dtype", nargs="+", choices=KV_CACHE_DTYPES, default=["int8"], metavar="DTYPE"
    )
    parser.add_argument("--window", type=int, default=1024, help="tokens that see one another")
    parser.add_argument("--chunk", type=int, default=256, help="tokens of a step")
    parser.add_argument("--out", type=Path, help="default: bench/results/quality-<device>.csv")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
