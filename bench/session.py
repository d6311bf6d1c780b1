"""What the commands that measure the registry share: arguments, the device, the loop over cases."""

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bench.case import Case
from bench.ops import QUICK, cases
from bench.results import OURS, ResultsFile, Row, default_path, provenance, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    ops = sorted({case.op for case in cases(QUICK)})
    parser.add_argument("--op", action="append", choices=ops, help="only this; may be repeated")
    parser.add_argument(
        "--filter", default="", help='only cases whose "op name" contains this text'
    )
    _add_device_arguments(parser)


def _add_device_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="tiny shapes: a test of the harness")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, or cpu with --quick")


def device_of(parser: argparse.ArgumentParser, args: argparse.Namespace) -> torch.device:
    """The device of `--device`, made the current one."""
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    elif not args.quick:
        parser.error("--device is cpu, must be cuda unless --quick is given")
    return device


def is_selected(args: argparse.Namespace, op: str, case: str) -> bool:
    """Whether `--op` and `--filter` let the case through."""
    return (not args.op or op in args.op) and args.filter in f"{op} {case}"


def is_partial(args: argparse.Namespace) -> bool:
    """Whether `--op` or `--filter` leaves anything out."""
    return bool(args.op or args.filter)


def select(
    parser: argparse.ArgumentParser, args: argparse.Namespace, registry: Iterable[Case]
) -> list[Case]:
    selected = [case for case in registry if is_selected(args, case.op, case.name)]
    if not selected:
        parser.error(f"--filter is {args.filter!r}, no case of --op has it in its name")
    return selected


def open_console() -> Console:
    # A pipe has no width; the tables need this much.
    return Console(width=None if Console().is_terminal else 200)


def single_table(
    argv: Sequence[str] | None,
    kind: str,
    description: str,
    legend: str,
    cases_of: Callable[[bool], list[Case]],
    measure_on: Callable[[torch.device, bool], Callable[[Case], list[Row]]],
) -> int:
    """A command, `python -m bench.<kind>`, that measures cases of its own and keeps them in a file
    of its own. `cases_of` and `measure_on` are told whether shapes are to be tiny."""
    parser = argparse.ArgumentParser(prog=f"python -m bench.{kind}", description=description)
    _add_device_arguments(parser)
    parser.add_argument(
        "--out", type=Path, help=f"the CSV file; default: bench/results/{kind}-<gpu>.csv"
    )
    args = parser.parse_args(argv)
    device = device_of(parser, args)
    console = open_console()
    common = provenance(device)
    path = args.out or default_path(kind, common["gpu"], args.quick)
    results = ResultsFile(path, common)
    measure = measure_on(device, args.quick)

    def measure_and_keep(case: Case) -> list[Row]:
        of_case = measure(case)
        results.write(of_case)
        return of_case

    rows = measure_all(cases_of(args.quick), measure_and_keep, console)
    return conclude(rows, path, legend, common, console)


def conclude(
    rows: list[Row], path: Path, legend: str, common: Mapping[str, str], console: Console
) -> int:
    """Prints a table for each op. The exit status: 1 if a result of our own is wrong or missing."""
    for op, of_op in groupby(rows, lambda row: row.op):
        console.print(table(op, list(of_op)), "")
    console.print(f"{legend}\n{', '.join(f'{k} {v}' for k, v in common.items())}\n{path}")
    return int(any(row.impl == OURS and not row.ok for row in rows))


def measure_all(
    selected: list[Case], measure: Callable[[Case], list[Row]], console: Console
) -> list[Row]:
    """The rows of one case after the other. What is not right is reported at once."""
    rows = []
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress, torch.no_grad():
        task = progress.add_task("", total=len(selected))
        for case in selected:
            progress.update(task, description=f"{case.op} {case.name}")
            of_case = measure(case)
            rows += of_case
            for row in of_case:
                if not row.ok:
                    console.print(f"{row.op} {row.case}, {row.impl}: {row.note}", markup=False)
            progress.advance(task)
    return rows
