"""Measures the ops beside their peers, in one process: `python -m bench.run`.

Every result is checked first, and a wrong one gets no time. Prints a table for each op and writes a
CSV file, case by case; with --op or --filter the other cases of the file stay in it. Exits with 1
if one of our own results was wrong or missing.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from bench import ceilings, libraries, session
from bench.case import Case
from bench.measure import measure_case
from bench.ops import FULL, QUICK, cases
from bench.results import CEILING, ResultsFile, Row, default_path, provenance

LEGEND = "us by graph replay, inputs not in the L2 (TB/s or TFLOP/s, share of the ceiling)"


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    device = session.device_of(parser, args)
    suite = QUICK if args.quick else FULL
    if args.max_autotune:
        suite = replace(suite, compile_modes=(*suite.compile_modes, "max-autotune-no-cudagraphs"))
    selected = session.select(parser, args, cases(suite))
    console = session.open_console()
    others = libraries.load(device, partial(console.print, markup=False))
    selected = [libraries.with_peers(case, others) for case in selected]

    common = provenance(device)
    path = args.out or default_path("ops", common["gpu"], args.quick)
    results = ResultsFile(path, common, keep=session.is_partial(args))
    highest = ceilings.measure(device, args.quick)
    rows = [
        Row(CEILING, f"{c.kind} {c.case}", "device", c.us, rate=c.rate, unit=c.unit, ok=True)
        for c in highest.values()
    ]
    results.write(rows)

    def measure(case: Case) -> list[Row]:
        if not args.quick:
            torch.compiler.reset()  # else earlier shapes count as recompilations, up to a limit
        of_case = measure_case(case, device, highest)
        results.write(of_case)
        return of_case

    rows += session.measure_all(selected, measure, console)
    return session.conclude(rows, path, LEGEND, common, console)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.run", description=__doc__)
    session.add_arguments(parser)
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
