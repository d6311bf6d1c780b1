"""The regression gate: measures our ops and compares with a CSV file: `python -m bench.compare`.

A case fails when its result is wrong; when its share of the ceiling, each measured in its own run,
is more than 5% below the share in the file; and when it took less than 3 us there, where a share
says little, if it takes over 0.2 us more. What fails is measured a second time: a hiccup does not
repeat. Cases that only one side has are listed. Exits with 1 if a case failed or none was compared.
"""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench import ceilings, session
from bench.case import Case
from bench.measure import measure_case
from bench.ops import FULL, QUICK, cases
from bench.results import OURS, Row, default_path, provenance, read_rows

LEAST_SHARE = 0.95  # of the share in the file
SHORT_US = 3.0
MOST_ADDED_US = 0.2

Key = tuple[str, str]  # op, case


@dataclass(frozen=True)
class Comparison:
    passed: list[Key]
    failed: dict[Key, str]  # and why
    only_before: list[Key]
    only_now: list[Key]  # also if the file has no right result


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    device = session.device_of(parser, args)
    suite = QUICK if args.quick else FULL
    selected = [replace(case, peers={}) for case in session.select(parser, args, cases(suite))]
    common = provenance(device)
    path = args.against or default_path("ops", common["gpu"], args.quick)
    if not path.exists():
        parser.error(f"--against is {path}, which does not exist")
    before = [row for row in read_rows(path) if session.is_selected(args, row.op, row.case)]

    console = session.open_console()
    highest = ceilings.measure(device, args.quick)

    def measure(some: list[Case]) -> list[Row]:
        return session.measure_all(some, lambda case: measure_case(case, device, highest), console)

    now = measure(selected)
    failed = compare(before, now).failed
    now += measure([case for case in selected if (case.op, case.name) in failed])
    result = compare(before, now)
    _report(result, console)
    console.print(f"{path} and now: {', '.join(f'{k} {v}' for k, v in common.items())}")
    return int(bool(result.failed) or not result.passed)


def compare(before: Iterable[Row], now: Iterable[Row]) -> Comparison:
    """Of our own rows. The last row of a case counts."""
    old = {key: row for key, row in _ours(before).items() if row.ok}
    new = _ours(now)
    failed = {key: why for key, row in new.items() if (why := failure(old.get(key), row))}
    return Comparison(
        passed=[key for key in new if key in old and key not in failed],
        failed=failed,
        only_before=[key for key in old if key not in new],
        only_now=[key for key in new if key not in old],
    )


def failure(before: Row | None, now: Row) -> str:
    """Why the case fails; empty if it does not."""
    if not now.ok:
        return now.note
    if before is None:
        return ""
    (old_us, old_share), (us, share) = _figures(before), _figures(now)
    if old_us < SHORT_US:
        return f"{us:.2f} us, was {old_us:.2f} us" if us > old_us + MOST_ADDED_US else ""
    if share >= old_share * LEAST_SHARE:
        return ""
    return f"{share:.1%} of the ceiling ({us:.1f} us), was {old_share:.1%} ({old_us:.1f} us)"


def _figures(row: Row) -> tuple[float, float]:
    """(us, share) of a right result."""
    assert row.graph_us is not None
    assert row.share is not None
    return row.graph_us, row.share


def _ours(rows: Iterable[Row]) -> dict[Key, Row]:
    return {(row.op, row.case): row for row in rows if row.impl == OURS}


def _report(result: Comparison, console: Console) -> None:
    for title, keys in (("only in the file", result.only_before), ("new", result.only_now)):
        for op, case in keys:
            console.print(f"{title}: {op} {case}", highlight=False)
    if result.failed:
        table = Table("op", "case", "failed", box=None)
        for (op, case), why in result.failed.items():
            table.add_row(op, case, escape(why))
        console.print(table)
    console.print(f"{len(result.passed)} cases passed, {len(result.failed)} failed")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__)
    session.add_arguments(parser)
    parser.add_argument(
        "--against", type=Path, help="the CSV file; default: bench/results/ops-<gpu>.csv"
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
