"""How far attention is from float64: `python -m bench.accuracy`.

Of prefill in bf16, ours and each library's: the error of all outputs together, ‖out - exact‖ over
‖exact‖, and that of the worst row, as in the tables of speed. The reference gets the same rounded
inputs. Prints a table and writes a CSV file.
"""

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from rich.table import Table

from bench import libraries, session
from bench.case import Case, clone, ours
from bench.checks import row_error, to_double, total_error
from bench.measure import failed
from bench.ops import FULL, QUICK
from bench.prefill import exact, prefills
from bench.results import OURS, ResultsFile, Row, default_path, provenance

UNIT = "relative error"
LEFT_OUT = ("echo-portable", "flex")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.accuracy", description=__doc__)
    session.add_arguments(parser)
    parser.add_argument(
        "--out", type=Path, help="the CSV file; default: bench/results/accuracy-<gpu>.csv"
    )
    args = parser.parse_args(argv)
    device = session.device_of(parser, args)
    console = session.open_console()
    others = libraries.load(device, partial(console.print, markup=False))
    selected = [
        libraries.with_peers(case, others)
        for case in session.select(parser, args, prefills(QUICK if args.quick else FULL))
    ]
    common = provenance(device)
    path = args.out or default_path("accuracy", common["gpu"], args.quick)
    results = ResultsFile(path, common, keep=session.is_partial(args))

    def measure(case: Case) -> list[Row]:
        rows = list(errors(case, device))
        results.write(rows)
        return rows

    rows = session.measure_all(selected, measure, console)
    console.print(_table(rows), f"{path}")
    return int(any(row.impl == OURS and not row.ok for row in rows))


def errors(case: Case, device: torch.device) -> Iterator[Row]:
    torch.manual_seed(0)
    inputs = case.make(device)
    wanted = exact(*map(to_double, inputs))
    peers = {name: peer for name, peer in case.peers.items() if name not in LEFT_OUT}
    for name, peer in {OURS: ours(case), **peers}.items():
        try:
            call = peer.prepare(*clone(inputs))
            with peer.context():
                out = call()
        except Exception as failure:
            yield failed(case, name, failure)
            continue
        total, worst = total_error(out, wanted), row_error(out, wanted)
        ok = total < case.tolerance
        yield Row(case.op, case.name, name, rate=total, unit=UNIT, ok=ok, error=worst)


def _table(rows: list[Row]) -> Table:
    table = Table("case", "", "all outputs", "worst row")
    for row in rows:
        figures = [f"{x:.2e}" if x is not None else row.note for x in (row.rate, row.error)]
        table.add_row(row.case, row.impl, *figures)
    return table


if __name__ == "__main__":
    raise SystemExit(main())
