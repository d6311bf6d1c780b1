"""How long a call keeps the host, beside `torch.add`: `python -m bench.host_cost`.

An eager call costs the host about the same at any shape, and small batches wait for the host. One
op by each of its names first, then every other op at its smallest case, beside what other libraries
have for it. Each figure has its ratio to `torch.add` (4 x 4096 bf16, output allocated), timed in
turn with it. Prints a table for each op and writes a CSV file.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import libraries, session
from bench.case import Case, Peer, mutating
from bench.inputs import randn
from bench.measure import check_and_time
from bench.ops import FULL, QUICK, cases
from bench.results import OURS, ResultsFile, Row, default_path, provenance
from bench.timing import Call, host_us

UNIT = "x torch.add"
TOKENS, HIDDEN = 4, 4096


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    device = session.device_of(parser, args)
    console = session.open_console()
    others = libraries.load(device, partial(console.print, markup=False))
    selected = session.select(parser, args, host_cases(args.quick))
    selected = [libraries.with_peers(case, others) for case in selected]
    common = provenance(device)
    path = args.out or default_path("host", common["gpu"], args.quick)
    add = _add(device)
    results = ResultsFile(path, common, keep=session.is_partial(args))
    [us] = host_us([add], device)
    case_name = f"T{TOKENS}_H{HIDDEN}"
    rows = [Row("add", case_name, "torch", host_us=us, rate=1.0, unit=UNIT, ok=True)]
    results.write(rows)

    def measure(case: Case) -> list[Row]:
        of_case = check_and_time(
            case, device, partial(_figures, add, device), lambda figures: figures, lambda x: [x]
        )
        results.write(of_case)
        return of_case

    rows += session.measure_all(selected, measure, console)
    return session.conclude(rows, path, f"us of the host ({UNIT})", common, console)


def host_cases(quick: bool) -> list[Case]:
    """`fused_add_rms_norm` by all its names, then every other op at its smallest case."""
    suite = QUICK if quick else FULL
    [first] = [
        case
        for case in cases(replace(suite, tokens=(TOKENS,), hidden=(HIDDEN,)))
        if case.op == "fused_add_rms_norm"
    ]
    packet = torch.ops.echo.fused_add_rms_norm
    names: dict[str, Callable[..., None]] = {
        f"{OURS}-packet": packet,
        f"{OURS}-overload": packet.default,
    }
    others = [
        replace(min(of_op, key=lambda case: case.num_bytes), peers={})
        for op, of_op in groupby(cases(suite), lambda case: case.op)
        if op != first.op
    ]
    return [
        replace(first, peers={k: Peer(partial(_add_norm, v)) for k, v in names.items()}),
        *others,
    ]


def _figures(add: Call, device: torch.device, calls: Sequence[Call]) -> dict[str, Any]:
    [call] = calls
    us, add_us = host_us([call, add], device)
    return {"host_us": us, "rate": us / add_us, "unit": UNIT}


def _add(device: torch.device) -> Call:
    a, b = (randn(device, TOKENS, HIDDEN) for _ in range(2))
    return lambda: torch.add(a, b)


def _add_norm(
    op: Callable[..., None], x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> Call:
    return mutating(op, x, residual, weight, eps, outputs=(x, residual))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.host_cost", description=__doc__)
    session.add_arguments(parser)
    parser.add_argument(
        "--out", type=Path, help="the CSV file; default: bench/results/host-<gpu>.csv"
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
