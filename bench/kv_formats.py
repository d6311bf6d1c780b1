"""What keys and values of fewer bits cost: `python -m bench.kv_formats`.

Attention in float64 over keys and values as several formats of a cache hold them, against attention
over those that were written: the error of all outputs together, ‖out - exact‖ over ‖exact‖, and
that of the worst row. Nothing else is rounded, so the errors are those of the formats. Prints a
table and writes a CSV file. On the CPU.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor

from bench import session
from bench.checks import row_error, total_error
from bench.results import ResultsFile, Row, default_path, provenance

HEADS, QUERIES, KEYS, HEAD_DIM = 8, 64, 4096, 128
UNIT = "relative error"
LIMIT = 127

Rows = Callable[[Tensor], Tensor]
"""Of [heads, tokens, head_dim] in float64: as a cache would give it back."""


def in_bf16(x: Tensor) -> Tensor:
    return x.bfloat16().double()


def in_codes(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).round().clamp(-LIMIT, LIMIT) * scale


def by_token(x: Tensor) -> Tensor:
    """What `kv_cache_dtype="int8"` does."""
    return in_codes(x, _scale(x, -1))


def by_token_in_fp16(x: Tensor) -> Tensor:
    return in_codes(x, _scale(x, -1).half().double())


def by_tensor(x: Tensor) -> Tensor:
    return in_codes(x, _scale(x, (0, 1, 2)))


def by_channel(x: Tensor) -> Tensor:
    return in_codes(x, _scale(x, 1))


def in_fp8(x: Tensor) -> Tensor:
    """What `kv_cache_dtype="fp8"` does."""
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (x / scale).to(torch.float8_e4m3fn).double() * scale


FORMATS: dict[str, tuple[Rows, Rows]] = {  # of keys and of values
    "bf16": (in_bf16, in_bf16),
    "int8": (by_token, by_token),
    "int8, fp16 scales": (by_token_in_fp16, by_token_in_fp16),
    "int8, keys by channel": (by_channel, by_token),
    "int8, one scale": (by_tensor, by_tensor),
    "fp8": (in_fp8, in_fp8),
}


def normal(gen: torch.Generator) -> Tensor:
    return torch.randn(HEADS, KEYS, HEAD_DIM, generator=gen, dtype=torch.float64)


def outlier_channels(gen: torch.Generator) -> Tensor:
    """A few channels of each head are twenty times as large in every token."""
    keys = normal(gen)
    for head in range(HEADS):
        keys[head, :, torch.randperm(HEAD_DIM, generator=gen)[:3]] *= 20
    return keys


def heavy_tails(gen: torch.Generator) -> Tensor:
    """Student's t of three degrees of freedom: here and there an element is huge."""
    chi = sum(normal(gen).square() for _ in range(3))
    return normal(gen) / (torch.as_tensor(chi) / 3).sqrt()


def loud_tokens(gen: torch.Generator) -> Tensor:
    """A few tokens are a hundred times as large, as those that all others attend to may be."""
    keys = normal(gen)
    keys[:, torch.randperm(KEYS, generator=gen)[:4]] *= 100
    return keys


KINDS: dict[str, Callable[[torch.Generator], Tensor]] = {
    "normal": normal,
    "outlier channels": outlier_channels,
    "heavy tails": heavy_tails,
    "loud tokens": loud_tokens,
}


def errors(kind: str) -> list[Row]:
    gen = torch.Generator().manual_seed(0)
    keys, values = KINDS[kind](gen), normal(gen)
    if kind == "loud tokens":
        values = KINDS[kind](gen)
    queries = torch.randn(HEADS, QUERIES, HEAD_DIM, generator=gen, dtype=torch.float64)
    # Scores of standard deviation 2, whatever the keys are.
    queries *= 2 / (queries @ keys.mT).std()
    exact = _attention(queries, keys, values)
    rows = []
    for name, (of_keys, of_values) in FORMATS.items():
        out = _attention(queries, of_keys(keys), of_values(values))
        total, worst = total_error(out, exact), row_error(out, exact)
        rows.append(Row("kv_formats", kind, name, rate=total, unit=UNIT, ok=True, error=worst))
    return rows


def _scale(x: Tensor, dims: int | tuple[int, ...]) -> Tensor:
    return (x.abs().amax(dims, keepdim=True) / LIMIT).clamp_min(1e-12)


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT, -1) @ v


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.kv_formats", description=__doc__)
    parser.add_argument("--out", type=Path, help="the CSV file")
    args = parser.parse_args(argv)
    common = provenance(torch.device("cpu"))
    path = args.out or default_path("kv_formats", "cpu", False)
    results = ResultsFile(path, common)
    table = Table("keys", "cache", "all outputs", "worst row")
    for kind in KINDS:
        rows = errors(kind)
        results.write(rows)
        for row in rows:
            table.add_row(row.case, row.impl, f"{row.rate:.2e}", f"{row.error:.2e}")
    session.open_console().print(table, f"{path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
