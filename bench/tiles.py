"""Measures an op under other tile configurations than its own: `python -m bench.tiles OP`.

The way to find the numbers in an op's `_config`. A configuration that is wrong or does not compile
is reported and passed over.
"""

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import product

import torch

from bench import ceilings
from bench.case import Case
from bench.measure import Ceilings, measure_case
from bench.ops import FULL, cases
from bench.results import OURS
from echokernels._tuning import TileConfig, forced


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.tiles", description=__doc__)
    parser.add_argument("op")
    parser.add_argument("--filter", default="", help="only cases whose name contains this")
    parser.add_argument("--m", type=int, nargs="+", required=True, help="rows of a tile")
    parser.add_argument("--n", type=int, nargs="+", required=True, help="columns of a tile")
    parser.add_argument("--warps", type=int, nargs="+", default=[4])
    parser.add_argument("--stages", type=int, nargs="+", default=[1])
    args = parser.parse_args(argv)
    device = torch.device("cuda")
    highest = ceilings.measure(device, quick=True)
    grid = [TileConfig(*tile) for tile in product(args.m, args.n, args.warps, args.stages)]
    with torch.no_grad():
        for case in cases(FULL):
            if case.op == args.op and args.filter in case.name:
                for config in (None, *grid):
                    print(f"{case.name:20} {_measured(case, config, device, highest)}", flush=True)
    return 0


def _measured(
    case: Case, config: TileConfig | None, device: torch.device, highest: Ceilings
) -> str:
    alone = replace(case, peers={})
    with nullcontext() if config is None else forced(case.op, config):
        [row] = [r for r in measure_case(alone, device, highest) if r.impl == OURS]
    name = "default" if config is None else repr(config)
    if row.graph_us is None:
        return f"{name} {row.note}"
    return f"{name} {row.graph_us:.1f} us {row.rate:.2f} {row.unit}"


if __name__ == "__main__":
    raise SystemExit(main())
