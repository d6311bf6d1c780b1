"""Measures the ops beside their peers, in one process: `python -m bench.run`.

Every result is checked first, and a wrong one gets no time. Prints a table for each op and writes a
CSV file, case by case. Exits with 1 if one of our own results was wrong or missing.
"""

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bench import ceilings
from bench.case import Case
from bench.measure import measure_case
from bench.ops import FULL, QUICK, cases
from bench.results import OURS, ResultsFile, Row, provenance, table

RESULTS = Path(__file__).parent / "results"
LEGEND = (
    "us by graph replay, inputs not in the L2 (TB/s or TFLOP/s, share of the ceiling), "
    "then us of an eager call"
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    elif not args.quick:
        parser.error("--device is cpu, must be cuda unless --quick is given")
    selected = _select(args)
    if not selected:
        parser.error(f"--filter is {args.filter!r}, no case of --op has it in its name")

    # A pipe has no width; the tables need this much.
    console = Console(width=None if Console().is_terminal else 200)
    common = provenance(device)
    path = args.out or RESULTS / _file_name(common["gpu"], args.quick)
    with torch.no_grad(), ResultsFile(path, common) as results, _progress(console) as progress:
        rows = list(_measure(selected, device, args.quick, results, progress))
    for op, of_op in groupby(rows, lambda row: row.op):
        console.print(table(op, list(of_op)), "")
    console.print(f"{LEGEND}\n{', '.join(f'{k} {v}' for k, v in common.items())}\n{path}")
    return int(any(row.impl == OURS and not row.ok for row in rows))


def _measure(
    selected: list[Case],
    device: torch.device,
    quick: bool,
    results: ResultsFile,
    progress: Progress,
) -> Iterator[Row]:
    task = progress.add_task("ceilings", total=len(selected))
    highest = ceilings.measure(device, quick)
    rows = [
        Row("ceiling", f"{c.kind} {c.case}", "device", c.us, None, c.rate, c.unit, 1.0, ok=True)
        for c in highest.values()
    ]
    results.write(rows)
    yield from rows
    for case in selected:
        progress.update(task, description=f"{case.op} {case.name}")
        if not quick:
            torch.compiler.reset()  # else earlier shapes count towards the limit of recompilations
        rows = measure_case(case, device, highest)
        results.write(rows)
        yield from rows
        for row in rows:
            if not row.ok:
                progress.console.print(f"{row.op} {row.case}, {row.impl}: {row.note}", markup=False)
        progress.advance(task)


def _select(args: argparse.Namespace) -> list[Case]:
    suite = QUICK if args.quick else FULL
    if args.max_autotune:
        suite = replace(suite, compile_modes=(*suite.compile_modes, "max-autotune-no-cudagraphs"))
    return [
        case
        for case in cases(suite)
        if (not args.op or case.op in args.op) and args.filter in f"{case.op} {case.name}"
    ]


def _file_name(gpu: str, quick: bool) -> str:
    slug = re.sub(r"[^a-z0-9]+", "-", gpu.lower())
    return f"ops-{slug}{'-quick' if quick else ''}.csv"


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.run", description=__doc__)
    ops = sorted({case.op for case in cases(QUICK)})
    parser.add_argument("--op", action="append", choices=ops, help="only this; may be repeated")
    parser.add_argument(
        "--filter", default="", help='only cases whose "op name" contains this text'
    )
    parser.add_argument("--quick", action="store_true", help="tiny shapes: a test of the harness")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, or cpu with --quick")
    parser.add_argument(
        "--max-autotune",
        action="store_true",
        help="also torch.compile in mode max-autotune-no-cudagraphs: slow to compile",
    )
    parser.add_argument(
        "--out", type=Path, help="the CSV file; default: bench/results/ops-<gpu>.csv"
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
