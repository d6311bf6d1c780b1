"""Measures an op under other tile configurations than its own: `python -m bench.tiles OP`.

The way to find the numbers in an op's `_config` and in `attention/split.py`. A configuration that
is wrong or does not compile is reported and passed over.
"""

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
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
    parser.add_argument("--m", type=int, nargs="+", default=[], help="rows of a tile")
    parser.add_argument("--n", type=int, nargs="+", default=[], help="columns of a tile")
    parser.add_argument("--warps", type=int, nargs="+", default=[4])
    parser.add_argument("--stages", type=int, nargs="+", default=[1])
    parser.add_argument("--splits", type=int, nargs="+", default=[], help="num_splits of the op")
    args = parser.parse_args(argv)
    device = torch.device("cuda")
    highest = ceilings.measure(device, quick=True)
    tiles = [None, *(TileConfig(*t) for t in product(args.m, args.n, args.warps, args.stages))]
    with torch.no_grad():
        for case in cases(FULL):
            if case.op == args.op and args.filter in case.name:
                for tile, splits in product(tiles, [None, *args.splits]):
                    _report(case, tile, splits, device, highest)
    return 0


def _report(
    case: Case, tile: TileConfig | None, splits: int | None, device: torch.device, highest: Ceilings
) -> None:
    run = case.run if splits is None else partial(case.run, num_splits=splits)
    alone = replace(case, run=run, peers={})
    with nullcontext() if tile is None else forced(case.op, tile):
        [row] = [r for r in measure_case(alone, device, highest) if r.impl == OURS]
    figure = row.note
    if row.graph_us is not None:
        figure = f"{row.graph_us:.1f} us {row.rate:.2f} {row.unit}"
    name = f"{tile or 'own tile'}, {'own' if splits is None else splits} splits"
    print(f"{case.name:20} {name}: {figure}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
