"""Measures layers of experts with few tokens under tiles of all kinds:
`python -m bench.moe_few_tiles --out FILE`.

A layer is timed as a whole, for its second launch begins in the first: choices as they come
(moe/_direct.py) under every pair of tiles, and in the order of their experts, with some tiles of
the grouped products and with those that the op chooses. From 4 choices an expert on these are tiles
of the kernel for Hopper, with and without the second product's weights loaded early. Experts differ
from call to call, so that weights come from memory. A result is checked before it is timed; kernels
of few choices are compiled first, by several processes.
"""

import argparse
import csv
import multiprocessing
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import echokernels
from bench import formulas
from bench.checks import row_error
from bench.inputs import randn
from bench.suites import FULL, Experts
from bench.timing import graph_us, make_round
from echokernels._tuning import TileConfig, forced
from echokernels.moe import fused_moe as layer_op
from echokernels.moe._hopper_gemm import HopperTile
from echokernels.moe.grouped_gemm import GroupedTile

_SETS = 8  # of inputs, each with experts of its own
_TURNS, _TURN_US = 3, 4000.0
_TOLERANCE = 2.0**-6

# Outputs, columns, warps, stages.
_GATE_UP = (
    (2, 1024, 4, 4), (4, 1024, 4, 3), (4, 1024, 4, 4), (4, 512, 2, 4), (8, 512, 4, 3),
    (4, 2048, 8, 3), (16, 256, 4, 4),
)  # fmt: skip
_DOWN = {
    8: ((1, 256, 2, 3), (2, 256, 4, 3), (4, 256, 4, 3), (2, 128, 4, 6)),
    2: ((4, 512, 4, 4), (8, 512, 4, 3), (4, 1024, 4, 3), (2, 1024, 4, 3)),
}
# BLOCK_M, BLOCK_K, warps, stages, BLOCK_T, programs on an SM.
_GROUPED = (
    (64, 64, 4, 5, 16, 2), (64, 64, 4, 5, 16, 3), (64, 64, 4, 5, 16, 4), (64, 64, 4, 8, 16, 2),
    (64, 128, 4, 4, 16, 2), (64, 128, 4, 3, 16, 2), (64, 128, 4, 3, 16, 3), (64, 128, 4, 4, 16, 3),
    (32, 128, 2, 4, 16, 4), (128, 64, 4, 4, 16, 2), (128, 128, 4, 3, 16, 1),
)  # fmt: skip
# Weight rows, stages.
_HOPPER = ((256, 4), (256, 3), (128, 6), (128, 4))


class Tiles(NamedTuple):
    """Of the ops that are forced; none: those that the op chooses."""

    path: str  # "direct", "ordered", or "late": ordered, no weights loaded early
    tiles: Mapping[str, TileConfig]


class Given(NamedTuple):
    x: Tensor
    w1: Tensor
    w2: Tensor
    weights: Tensor
    ids: Tensor


def _all_tiles(shape: Experts, tokens: int) -> Iterator[Tiles]:
    yield Tiles("ordered", {})
    if tokens * shape.chosen >= 4 * shape.count:
        yield Tiles("late", {})
        for path in ("ordered", "late"):
            for rows, stages in _HOPPER:
                yield Tiles(path, {"grouped_gemm_hopper": HopperTile(128, rows, num_stages=stages)})
        return
    yield Tiles("direct", {})
    for tile in _GROUPED:
        yield Tiles("ordered", {"grouped_gemm": GroupedTile(*tile)})
    for first in _GATE_UP:
        for second in _DOWN[shape.chosen]:
            tiles = {"moe_gate_up": TileConfig(*first), "moe_down": TileConfig(*second)}
            yield Tiles("direct", tiles)


def _run(tiles: Tiles, given: Given) -> Tensor:
    choose, multiply = layer_op._takes_direct, layer_op.launch_grouped_gemm
    layer_op._takes_direct = lambda *_: tiles.path == "direct"
    if tiles.path == "late":
        layer_op.launch_grouped_gemm = lambda *args, **_: multiply(*args)
    try:
        with ExitStack() as stack:
            for op, tile in tiles.tiles.items() or [("none", TileConfig(0, 0))]:
                stack.enter_context(forced(op, tile))
            return echokernels.fused_moe(*given)
    finally:
        layer_op._takes_direct, layer_op.launch_grouped_gemm = choose, multiply


def _given(shape: Experts, tokens: int, w1: Tensor, w2: Tensor) -> Given:
    scores, ids = torch.rand(tokens, shape.count, device=w1.device).topk(shape.chosen)
    scores /= scores.sum(1, keepdim=True)
    return Given(randn(w1.device, tokens, shape.hidden), w1, w2, scores, ids.int())


def _weights(shape: Experts, device: torch.device) -> tuple[Tensor, Tensor]:
    w1 = randn(device, shape.count, 2 * shape.width, shape.hidden).mul_(shape.hidden**-0.5)
    return w1, randn(device, shape.count, shape.hidden, shape.width).mul_(shape.width**-0.5)


def _compile(shape: Experts, share: Sequence[Tiles]) -> None:
    """Calls a layer with weights that nobody wrote."""
    make = partial(torch.empty, dtype=torch.bfloat16, device="cuda")
    w1 = make(shape.count, 2 * shape.width, shape.hidden)
    given = _given(shape, 1, w1, make(shape.count, shape.hidden, shape.width))
    for tiles in share:
        try:
            _run(tiles, given)
        except Exception as error:
            print(f"{tiles}: {type(error).__name__}: {error}".splitlines()[0], flush=True)
    torch.cuda.synchronize()


def _compile_all(shape: Experts, workers: int) -> None:
    """Each tile once: the n-th of the first kind together with the n-th of the second."""
    jobs: list[Tiles] = []
    seen: set[tuple[str, TileConfig]] = set()
    for tiles in _all_tiles(shape, tokens=1):
        fresh = {(op, tile) for op, tile in tiles.tiles.items()} - seen
        if fresh or not tiles.tiles:
            jobs.append(tiles)
            seen |= fresh
    context = multiprocessing.get_context("spawn")
    shares = [jobs[i::workers] for i in range(min(workers, len(jobs)))]
    with ProcessPoolExecutor(len(shares), mp_context=context) as pool:
        list(pool.map(_compile, [shape] * len(shares), shares))


def _measure(shape: Experts, given: list[Given]) -> list[tuple[float, Tiles]]:
    expected = formulas.fused_moe_grouped(*given[0])
    device, found = given[0].x.device, []
    for tiles in _all_tiles(shape, given[0].x.shape[0]):
        try:
            error = row_error(_run(tiles, given[0]), expected)
            if error > _TOLERANCE:
                print(f"{tiles}: WRONG, {error:.3g}", flush=True)
                continue
            work = make_round([partial(_run, tiles, g) for g in given], device)
            [us] = graph_us([work], device, turns=_TURNS, turn_us=_TURN_US)
            found.append((us, tiles))
        except Exception as failure:
            print(f"{tiles}: {type(failure).__name__}: {str(failure)[:120]}", flush=True)
    return sorted(found, key=lambda pair: pair[0])


def _text(tiles: Tiles) -> str:
    return "; ".join(f"{op} {tile}" for op, tile in tiles.tiles.items()) or "own"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.moe_few_tiles", description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the CSV to write")
    parser.add_argument("--shape", action="append", choices=sorted(FULL.expert_layers))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--workers", type=int, default=12, help="processes that compile")
    args = parser.parse_args(argv)
    device, start = torch.device("cuda"), time.monotonic()
    with args.out.open("w", newline="") as file, torch.no_grad():
        writer = csv.writer(file)
        writer.writerow(("case", "path", "tiles", "us"))
        for name in args.shape or sorted(FULL.expert_layers):
            shape = FULL.expert_layers[name]
            _compile_all(shape, args.workers)
            print(f"{name} compiled after {time.monotonic() - start:.0f} s", flush=True)
            torch.manual_seed(0)
            copies = [_weights(shape, device), _weights(shape, device)]
            for tokens in args.tokens:
                given = [_given(shape, tokens, *copies[i % 2]) for i in range(_SETS)]
                found = _measure(shape, given)
                rows = [(f"{name}_T{tokens}", t.path, _text(t), round(us, 2)) for us, t in found]
                writer.writerows(rows)
                for row in [*rows[:12], *(r for r in rows[12:] if r[1] != "direct")]:
                    print(*row, flush=True)
                file.flush()
            print(f"measured after {time.monotonic() - start:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
