"""The committed results as Markdown: `python -m bench.report > docs/performance.md`."""

import csv
from collections.abc import Callable, Iterator
from itertools import groupby

from bench.results import CEILING, OURS, RESULTS

INTRODUCTION = """\
# Performance

Made by `python -m bench.report` from the files in `bench/results`; the commands that made those are
`python -m bench.run`, `python -m bench.host_cost`, `python -m bench.accuracy` and `python -m
bench.cpu_speed`. Losses are in it. bf16; microseconds by graph replay with inputs that are not in
the L2, in brackets our share of the ceiling: a device copy, a streaming read (decode) or a large
matrix product (prefill). The best of a line is bold. `echo` is ours; `torch` and `compile` are the
plain formula, eager and compiled; `sdpa-...-dense-kv` gets its keys gathered beforehand, for it
cannot read pages.
"""
HOST = """\
Microseconds that an eager call keeps the host, in brackets the ratio to `torch.add` of 4 x 4096
(here {us:.1f} us), timed in turn with it. `echo` is our public function, with the allocation of
what it returns; `echo-packet` is `torch.ops.echo.<op>`, `echo-overload` its `.default`.
"""

LADDER = """\
One sequence, 32/8 heads, head dim 128: microseconds, in brackets KiB of scratch memory. `gathered`
copies all keys into one tensor first; `not-split` gives each KV head one program (PagedAttention
V1); `splits-of-64` is flash decoding at its finest; `echo` chooses. `int8` reads INT8 pages, whose
bytes are half; `int8-dequantised-first` makes pages of bf16 of them first.
"""

LAYOUT = """\
Decode over pages [page_size, kv_heads, head_dim] (`echo`) and [kv_heads, page_size, head_dim].
"""

ACCURACY = """\
Relative errors against float64 of the same bf16 inputs: of all outputs together, in brackets of the
worst row.
"""

FORMATS = """\
Relative errors of attention in float64 over keys and values as a cache holds them: of all outputs
together, in brackets of the worst row.
"""

Row = dict[str, str]
PLOTS = RESULTS.parent.parent / "docs" / "plots"


def main() -> None:
    print(report(), end="")


def report() -> str:
    lines = [INTRODUCTION]
    for path in sorted(RESULTS.glob("ops-*.csv")):
        lines += _device(list(csv.DictReader(path.open())), path.stem.partition("-")[2])
    for path in sorted(RESULTS.glob("host-*.csv")):
        lines += _host(list(csv.DictReader(path.open())))
    for path in sorted(RESULTS.glob("ladder-*.csv")):
        lines += [*_ladder(list(csv.DictReader(path.open()))), *_plot(path.stem)]
    for path in sorted(RESULTS.glob("kv_layout-*.csv")):
        lines += _layout(list(csv.DictReader(path.open())))
    for path in sorted(RESULTS.glob("accuracy-*.csv")):
        lines += _accuracy(list(csv.DictReader(path.open())))
    for path in sorted(RESULTS.glob("kv_formats-*.csv")):
        lines += _formats(list(csv.DictReader(path.open())))
    for path in sorted(RESULTS.glob("quality-*.csv")):
        lines += _quality(list(csv.DictReader(path.open())))
    for path in sorted(RESULTS.glob("cpu-*.csv")):
        lines += _cpu(list(csv.DictReader(path.open())))
    return "\n".join(lines) + "\n"


def _device(rows: list[Row], gpu: str) -> Iterator[str]:
    first = rows[0]
    yield f"## {first['gpu']}, torch {first['torch']}, Triton {first['triton']}\n"
    for commit, group in groupby(rows, lambda row: row["commit"]):
        ceilings = [row for row in group if row["op"] == CEILING]
        if ceilings:
            figures = ", ".join(f"{row['case']} {row['rate']} {row['unit']}" for row in ceilings)
            yield f"Ceilings at commit {commit[:7]}: {figures}.\n"
    for op, group in groupby(rows, lambda row: row["op"]):
        if op != CEILING:
            yield from _table(op, list(group))
        if op == "paged_attention":
            yield from _plot(f"decode-{gpu}")


def _plot(name: str) -> Iterator[str]:
    """What `bench.plot` drew, if it did."""
    if (PLOTS / f"{name}.svg").exists():
        yield f"![{name}](plots/{name}.svg)\n"


def _table(op: str, rows: list[Row]) -> Iterator[str]:
    impls = list(dict.fromkeys(row["impl"] for row in rows))
    commits = dict.fromkeys(row["commit"][:7] for row in rows)
    yield f"### {op} (commit {' and '.join(commits)})\n"
    yield from _header("case", impls)
    for case, group in groupby(rows, lambda row: row["case"]):
        cells = {row["impl"]: row for row in group}
        best = min(float(row["graph_us"]) for row in cells.values() if row["graph_us"])
        line = " | ".join(_cell(cells.get(impl), best) for impl in impls)
        yield f"| {case} | {line} |"
    yield ""


def _header(first: str, impls: list[str]) -> Iterator[str]:
    yield f"| {first} | {' | '.join(impls)} |"
    yield "|---" * (1 + len(impls)) + "|"


def _cell(row: Row | None, best: float) -> str:
    if row is None:
        return ""
    if not row["graph_us"]:
        return ": ".join(row["note"].split(": ")[:2])  # "failed" and the kind of error
    us = float(row["graph_us"])
    text = f"{us:.1f} ({float(row['share']):.0%})" if row["impl"] == OURS else f"{us:.1f}"
    return f"**{text}**" if us == best else text


def _host(rows: list[Row]) -> Iterator[str]:
    add, *rows = rows
    yield f"## Host cost, {add['gpu']}, torch {add['torch']}, Triton {add['triton']}\n"
    yield f"Commit {add['commit'][:7]}.\n\n{HOST.format(us=float(add['host_us']))}"
    impls = list(dict.fromkeys(row["impl"] for row in rows))
    yield from _header("op", impls)
    for (op, case), group in groupby(rows, lambda row: (row["op"], row["case"])):
        cells = {row["impl"]: _host_cell(row) for row in group}
        yield f"| {op} {case} | {' | '.join(cells.get(impl, '') for impl in impls)} |"
    yield ""


def _host_cell(row: Row) -> str:
    if not row["host_us"]:
        return row["note"]
    return f"{float(row['host_us']):.1f} ({float(row['rate']):.2f}x)"


def _ladder(rows: list[Row]) -> Iterator[str]:
    of = rows[0]
    yield f"## The ladder of decode, {of['gpu']}, torch {of['torch']}, Triton {of['triton']}\n"
    yield f"Commit {of['commit'][:7]}.\n\n{LADDER}"
    rows = [{**row, "case": f"{int(row['case']):,}"} for row in rows]
    yield from _by_case("keys", rows, _ladder_cell)


def _by_case(first: str, rows: list[Row], cell: Callable[[Row], str]) -> Iterator[str]:
    """A line for each case, a column for each implementation."""
    impls = list(dict.fromkeys(row["impl"] for row in rows))
    yield from _header(first, impls)
    for case, group in groupby(rows, lambda row: row["case"]):
        cells = {row["impl"]: cell(row) for row in group}
        yield f"| {case} | {' | '.join(cells.get(impl, '') for impl in impls)} |"
    yield ""


def _ladder_cell(row: Row) -> str:
    if not row["graph_us"]:
        return row["note"]
    return f"{float(row['graph_us']):.1f} ({float(row['rate']) / 1024:,.0f})"


def _layout(rows: list[Row]) -> Iterator[str]:
    of = rows[0]
    yield f"## Layout of cache pages, {of['gpu']}, torch {of['torch']}, Triton {of['triton']}\n"
    yield LAYOUT
    yield from _table("kv_layout", rows)


def _accuracy(rows: list[Row]) -> Iterator[str]:
    of = rows[0]
    yield f"## Errors of prefill, {of['gpu']}, torch {of['torch']}, Triton {of['triton']}\n"
    yield f"Commit {of['commit'][:7]}.\n\n{ACCURACY}"
    yield from _by_case("case", rows, _accuracy_cell)


def _accuracy_cell(row: Row) -> str:
    return f"{float(row['rate']):.2e} ({float(row['error']):.1e})" if row["rate"] else ""


def _formats(rows: list[Row]) -> Iterator[str]:
    yield f"## Formats of keys and values\n\nCommit {rows[0]['commit'][:7]}.\n\n{FORMATS}"
    yield from _by_case("keys", rows, _accuracy_cell)


def _quality(rows: list[Row]) -> Iterator[str]:
    of = rows[0]
    yield f"## Quality of a model by its cache, {of['gpu']}, torch {of['torch']}\n"
    yield f"`python -m bench.quality`, commit {of['commit'][:7]}.\n"
    yield "| | of | cache | |"
    yield "|---|---|---|---|"
    for row in rows:
        figure = f"{float(row['rate']):.5g} {row['note']}"
        yield f"| {row['op']} | {row['case']} | {row['impl']} | {figure} |"
    yield ""


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
