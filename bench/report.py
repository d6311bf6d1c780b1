"""The committed results as Markdown: `python -m bench.report > docs/performance.md`."""

import csv
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from bench.results import OURS

RESULTS = Path(__file__).parent / "results"
INTRODUCTION = """\
# Performance

Made by `python -m bench.report` from the files in `bench/results`; the commands that made those are
`python -m bench.run` and `python -m bench.cpu_speed`. Losses are in it. bf16; microseconds by graph
replay with inputs that are not in the L2, in brackets the share of the ceiling: a device copy, a
streaming read (decode) or a large matrix product (prefill). The best of a line is bold. `echo` is
ours; `torch` and `compile` are the plain formula, eager and compiled; `sdpa-...-dense-kv` gets its
keys gathered beforehand, for it cannot read pages.
"""

Row = dict[str, str]


def main() -> None:
    print(report(), end="")


def report() -> str:
    lines = [INTRODUCTION]
    for path in sorted(RESULTS.glob("ops-*.csv")):
        lines += _device(list(csv.DictReader(path.open())))
    for path in sorted(RESULTS.glob("cpu-*.csv")):
        lines += _cpu(list(csv.DictReader(path.open())))
    return "\n".join(lines) + "\n"


def _device(rows: list[Row]) -> Iterator[str]:
    first = rows[0]
    yield f"## {first['gpu']}, torch {first['torch']}, Triton {first['triton']}\n"
    for commit, group in groupby(rows, lambda row: row["commit"]):
        ceilings = [row for row in group if row["op"] == "ceiling"]
        if ceilings:
            figures = ", ".join(f"{row['case']} {row['rate']} {row['unit']}" for row in ceilings)
            yield f"Ceilings at commit {commit[:7]}: {figures}.\n"
    for op, group in groupby(rows, lambda row: row["op"]):
        if op != "ceiling":
            yield from _table(op, list(group))


def _table(op: str, rows: list[Row]) -> Iterator[str]:
    impls = list(dict.fromkeys(row["impl"] for row in rows))
    yield f"### {op} (commit {rows[0]['commit'][:7]})\n"
    yield f"| case | {' | '.join(impls)} |"
    yield "|---" * (1 + len(impls)) + "|"
    for case, group in groupby(rows, lambda row: row["case"]):
        cells = {row["impl"]: row for row in group}
        best = min(float(row["graph_us"]) for row in cells.values() if row["graph_us"])
        line = " | ".join(_cell(cells.get(impl), best) for impl in impls)
        yield f"| {case} | {line} |"
    yield ""


def _cell(row: Row | None, best: float) -> str:
    if row is None:
        return ""
    if not row["graph_us"]:
        return row["note"]
    us = float(row["graph_us"])
    text = f"{us:.1f} ({float(row['share']):.0%})"
    return f"**{text}**" if us == best else text


def _cpu(rows: list[Row]) -> Iterator[str]:
    first = rows[0]
    yield f"## CPU, one thread, fp32 (torch {first['torch']}, commit {first['commit'][:7]})\n"
    yield "SmolLM2-135M-Instruct, greedy; both give the same tokens.\n"
    yield "| case | who | tokens/s | |"
    yield "|---|---|---|---|"
    for row in rows:
        name = row["impl"].removeprefix(f"{OURS}-")
        yield f"| {row['case']} | {name} | {float(row['rate']):.1f} | {row['note']} |"


if __name__ == "__main__":
    main()
