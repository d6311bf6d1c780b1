"""Output tokens a second of whole engines, side by side: `python -m bench.engine --out FILE`.

    python -m bench.engine --engine echo --engine nano-vllm --workload offline-256
    python -m bench.engine --engine echo --option kv_cache_dtype=int8 --option num_pages=4096

Each engine runs in a process of its own, with random weights of one model's shape: a folder made on
the spot. A first, short workload is not counted. Prints tables and writes a CSV file. `arrivals`
comes request by request, and tells when tokens came: to the first one, and between two.
"""

import argparse
import csv
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from bench.engine_workloads import FULL, QUICK, WORKLOADS, Sizes
from bench.engines import ENGINES, Timeline, percentile
from bench.results import provenance

_TINY = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 40,
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 5e4,
    "max_position_embeddings": 256, "tie_word_embeddings": False, "torch_dtype": "float32",
    "eos_token_id": 2,
}  # fmt: skip
_QWEN3 = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151_936,
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "max_position_embeddings": 40_960, "tie_word_embeddings": True,
    "attention_bias": False, "torch_dtype": "bfloat16", "eos_token_id": 151_645,
}  # fmt: skip
MODELS: Mapping[str, Mapping[str, Any]] = {"tiny-llama": _TINY, "qwen3-0.6b": _QWEN3}

COLUMNS = (
    "engine", "options", "model", "workload", "requests", "prompt_tokens", "output_tokens",
    "seconds", "tokens_per_s", "first_p50_ms", "first_p99_ms", "between_p50_ms", "between_p99_ms",
    "start_s", "gpu", "torch", "triton", "commit", "date",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--engine", action="append", choices=ENGINES, help="default: echo")
    parser.add_argument("--workload", action="append", choices=WORKLOADS, help="default: all")
    parser.add_argument("--option", action="append", default=[], help="of echo: name=value")
    parser.add_argument("--model", choices=MODELS, help="default: qwen3-0.6b")
    parser.add_argument("--quick", action="store_true", help="small, for a CPU: a test")
    parser.add_argument("--out", type=Path, help="the CSV to write")
    args = parser.parse_args(argv)
    options = dict(_option(text) for text in args.option)
    model = args.model or ("tiny-llama" if args.quick else "qwen3-0.6b")
    names = args.workload or list(WORKLOADS)
    sizes = QUICK if args.quick else FULL
    rows, failures = [], 0
    with tempfile.TemporaryDirectory() as folder:
        for engine in args.engine or ["echo"]:
            own = options if engine == "echo" else {}
            job = (engine, own, model, names, sizes, Path(folder))
            try:
                rows += _in_a_process(job)
            except Exception as error:
                print(f"{engine}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                failures += 1
    if args.out is not None:
        with args.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    return 1 if failures else 0


def _option(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _in_a_process(job: tuple[Any, ...]) -> list[dict[str, Any]]:
    """With memory of its own, all of which it gives back."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_measure, *job).result()


def _measure(
    engine_name: str,
    options: Mapping[str, Any],
    model: str,
    names: Sequence[str],
    sizes: Sizes,
    folder: Path,
) -> list[dict[str, Any]]:
    _make_folder(folder, MODELS[model], with_weights=engine_name == "nano-vllm")
    start = time.perf_counter()
    engine = ENGINES[engine_name](folder, options)
    engine.run(WORKLOADS["offline-64"](QUICK))
    start_s = time.perf_counter() - start
    rows = []
    for name in names:
        workload = WORKLOADS[name](sizes)
        timeline = engine.run(workload)
        if timeline.output_tokens != workload.output_tokens:
            raise RuntimeError(
                f"{name}: {timeline.output_tokens} tokens came, not {workload.output_tokens}"
            )
        row = {
            "engine": engine_name,
            "options": " ".join(f"{key}={value}" for key, value in options.items()),
            "model": model,
            "workload": name,
            "requests": len(workload.prompts),
            "prompt_tokens": workload.prompt_tokens,
            "output_tokens": workload.output_tokens,
            "start_s": round(start_s, 1),
            **_figures(timeline),
            **_provenance(),
        }
        rows.append(row)
        print(*(f"{key} {value}" for key, value in _shown(row)), sep="   ", flush=True)
    return rows


def _figures(timeline: Timeline) -> dict[str, float]:
    figures = {
        "seconds": round(timeline.seconds, 3),
        "tokens_per_s": round(timeline.output_tokens / timeline.seconds, 1),
    }
    for name, values in (("first", timeline.to_first), ("between", timeline.between)):
        if values:
            for share in (50, 99):
                value = 1e3 * percentile(values, share / 100)
                figures[f"{name}_p{share}_ms"] = round(value, 3)
    return figures


def _shown(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in ("engine", "options", "workload", "tokens_per_s", "seconds"):
        if row[key] != "":
            yield key, row[key]
    for key, value in row.items():
        if key.endswith("_ms"):
            yield key, value


def _provenance() -> dict[str, str]:
    import torch

    return provenance(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def _make_folder(folder: Path, config: Mapping[str, Any], *, with_weights: bool) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    weights = folder / "model.safetensors"
    if with_weights and not weights.exists():
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(folder), dtype=getattr(torch, config["torch_dtype"])
            )
        model.save_pretrained(folder)


if __name__ == "__main__":
    raise SystemExit(main())
