"""How far rounding moves what a model predicts: `python -m bench.divergence`.

A random model of Llama's shape with head dim 128, whose weights bf16 can hold, reads random tokens.
KL from the predictions in fp32, in nats, the mean over tokens: of bf16, and of each with its keys
and values as codes. Adds rows to the CSV file of `bench.quality`.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console

from bench.quality import logits_of
from bench.results import ResultsFile, Row, default_path, provenance
from echokernels.runtime.config import ModelConfig
from echokernels.runtime.layers import Placement
from echokernels.runtime.loader import load_model, resolve_device
from echokernels.runtime.models.registry import CausalLM

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}
TOKENS, CHUNK = 1024, 256
BASELINE = ("float32", "auto")
OTHERS = (("bfloat16", "auto"), ("float32", "int8"), ("bfloat16", "int8"), ("float32", "fp8"))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.divergence", description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="default: bench/results/quality-<device>.csv")
    args = parser.parse_args(argv)
    torch.set_grad_enabled(False)
    rows = divergences(CONFIG, TOKENS, args.device)
    common = provenance(resolve_device(args.device))
    out = args.out or default_path("quality", common["gpu"], quick=False)
    ResultsFile(out, common, keep=True).write(rows)
    for row in rows:
        Console().print(f"{row.op}, {row.impl}: {row.rate:.3g} {row.note}", highlight=False)
    return 0


def divergences(shape: dict[str, object], tokens: int, device: str) -> list[Row]:
    exact, config, place = _models(shape, "float32", device)
    rounded, _, rounded_place = _models(shape, "bfloat16", device)
    for weight, of_exact in zip(rounded.parameters(), exact.parameters(), strict=True):
        weight.copy_(of_exact)
        of_exact.copy_(weight)
    gen = torch.Generator().manual_seed(0)
    token_ids = torch.randint(config.vocab_size, (tokens,), generator=gen).tolist()
    models = {"float32": (exact, place), "bfloat16": (rounded, rounded_place)}
    base = _log_p(*models[BASELINE[0]], config, BASELINE[1], token_ids)
    case = f"random Llama, head dim {config.head_dim}, {config.num_layers} layers"
    return [
        Row(
            "KL from float32",
            case,
            f"{dtype}, {kv_cache_dtype}",
            rate=float(_kl(base, _log_p(*models[dtype], config, kv_cache_dtype, token_ids))),
            ok=True,
            note=f"nats, of {tokens} tokens",
        )
        for dtype, kv_cache_dtype in OTHERS
    ]


def _kl(base: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (base.exp() * (base - other)).sum(-1).mean()


def _log_p(
    model: CausalLM,
    place: Placement,
    config: ModelConfig,
    kv_cache_dtype: str,
    token_ids: list[int],
) -> torch.Tensor:
    chunks = logits_of(model, config, place, kv_cache_dtype, token_ids, CHUNK)
    return torch.cat([logits.double().log_softmax(-1).cpu() for logits in chunks])


def _models(
    shape: dict[str, object], dtype: str, device: str
) -> tuple[CausalLM, ModelConfig, Placement]:
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        return load_model(folder, dtype, device, load_format="dummy")


if __name__ == "__main__":
    raise SystemExit(main())
