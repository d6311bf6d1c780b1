"""Measures the grouped products of many rows with tiles of all kinds:
`python -m bench.moe_many_tiles --out FILE`.

Each product of a layer of experts by itself: the first gathers its rows and has the activation, the
second reads them in order. Tiles are compiled in parallel; each is run briefly and checked, and
those that were fastest are timed again, in turns.
"""

import argparse
import csv
import multiprocessing
import pathlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from bench.checks import row_error
from bench.inputs import randn
from bench.suites import FULL, Experts
from bench.timing import Call, graph_us, make_round
from echokernels._path import Path, forced_path
from echokernels._tuning import TileConfig, forced
from echokernels.moe._hopper_gemm import HopperTile
from echokernels.moe._order import num_counts, order
from echokernels.moe.grouped_gemm import GroupedTile, launch_grouped_gemm

_TOKENS = {
    "qwen3-30b-a3b": (64, 256, 512, 1024, 4096, 16_384),
    "mixtral-8x7b": (64, 256, 512, 4096),
}
_MANY = 512  # tokens, for which other tiles than its own are tried of the portable kernel
_CALLS = 3  # of each tile, before the best are chosen
_BEST = 6
_TOLERANCE = 2.0**-6
_ALL = 2**20  # row tiles in a group: all that an expert has


class Tile(NamedTuple):
    """What is compiled. Programs per SM and groups only matter at the launch."""

    block_m: int  # weight rows
    block_t: int  # rows of x
    block_k: int
    warps: int
    stages: int
    programs_per_sm: tuple[int, ...] = (1,)


# Of the kernel for Hopper: weight rows, stages, and groups to try.
_HOPPER_TILES = (
    (256, 4, (16, 8, 1, _ALL)),
    (256, 3, (16,)),
    (128, 6, (16,)),
    (128, 4, (16,)),
)
_TILES = (
    Tile(256, 128, 64, 8, 4),
    Tile(256, 128, 64, 8, 3),
    Tile(256, 128, 128, 8, 2),
    Tile(128, 256, 64, 8, 4),
    Tile(128, 256, 64, 8, 3),
    Tile(128, 128, 64, 8, 3, (1, 2)),
    Tile(128, 128, 64, 8, 4),
    Tile(128, 128, 64, 4, 3, (1, 2)),
    Tile(128, 128, 128, 8, 3),
    Tile(256, 64, 64, 8, 4),
    Tile(256, 64, 64, 4, 4),
    Tile(256, 64, 128, 8, 2),
    Tile(128, 64, 64, 4, 4, (1, 2)),
    Tile(128, 64, 128, 4, 3),
    Tile(256, 32, 64, 8, 3, (1, 2)),
    Tile(256, 32, 128, 8, 2),
    Tile(128, 32, 128, 4, 4),
    Tile(128, 32, 64, 4, 4, (2, 4)),
)


@dataclass(frozen=True)
class Product:
    """One product of a layer: `gathers` its rows and has an activation, or neither."""

    model: str
    shape: Experts
    tokens: int
    gathers: bool

    @property
    def name(self) -> str:
        return f"{self.model}_T{self.tokens}_{'first' if self.gathers else 'second'}"

    @property
    def rows(self) -> int:
        return self.tokens * self.shape.chosen

    @property
    def weight_shape(self) -> tuple[int, int, int]:
        s = self.shape
        return (s.count, 2 * s.width, s.hidden) if self.gathers else (s.count, s.hidden, s.width)

    @property
    def tflop(self) -> float:
        _, size, depth = self.weight_shape
        return 2e-12 * self.rows * size * depth

    def tiles(self, paths: Sequence[str]) -> Iterator[TileConfig]:
        if "hopper" in paths:
            row_tiles = self.rows // self.shape.count // 128
            for block_n, stages, groups in _HOPPER_TILES:
                for group in groups if row_tiles >= 8 else groups[:1]:
                    yield HopperTile(128, block_n, num_stages=stages, group=group)
        if "portable" in paths and self.tokens >= _MANY:
            yield from self._portable_tiles()

    def _portable_tiles(self) -> Iterator[GroupedTile]:
        per_expert = self.rows // self.shape.count
        for tile in _TILES:
            if not min(per_expert // 4, 64) <= tile.block_t <= 4 * per_expert:
                continue
            groups = (_ALL, 8, 1) if 2 * tile.block_t <= per_expert else (_ALL,)
            for per_sm in tile.programs_per_sm:
                for group in groups:
                    yield GroupedTile(
                        tile.block_m, tile.block_k, tile.warps, tile.stages, tile.block_t, per_sm,
                        group,
                    )  # fmt: skip


class Arguments(NamedTuple):
    out: Tensor
    x: Tensor
    weight: Tensor
    offsets: Tensor
    choices: Tensor | None
    k: int

    def call(self, tile: TileConfig | None) -> Call:
        """None: the portable kernel with its own tile."""
        path: Path = "hopper" if isinstance(tile, HopperTile) else "portable"
        op = "grouped_gemm_hopper" if isinstance(tile, HopperTile) else "grouped_gemm"

        def run() -> Tensor:
            out, x, weight, offsets, choices, k = self
            activation = "none" if choices is None else "silu"
            args = (out, x, weight, offsets, None, activation, choices, k)
            with forced_path(path), nullcontext() if tile is None else forced(op, tile):
                launch_grouped_gemm(*args)
            return out

        return run


def _empty(product: Product, device: torch.device) -> Arguments:
    """No expert has a row: nothing is read but the offsets."""
    experts, size, depth = product.weight_shape
    width = size // 2 if product.gathers else size

    def make(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=device)

    choices = torch.empty(product.rows, dtype=torch.int32, device=device)
    return Arguments(
        make(product.rows, width),
        make(product.tokens if product.gathers else product.rows, depth),
        make(*product.weight_shape),
        torch.zeros(experts + 1, dtype=torch.int32, device=device),
        choices if product.gathers else None,
        product.shape.chosen if product.gathers else 1,
    )


def _filled(product: Product, device: torch.device, skewed: bool) -> Arguments:
    shape = product.shape
    empty = _empty(product, device)
    scores = torch.rand(product.tokens, shape.count, device=device)
    if skewed:
        scores[::2, :2] += 1
    ids = scores.topk(shape.chosen).indices.int()
    choices = torch.empty(product.rows, dtype=torch.int32, device=device)
    rows = torch.empty_like(ids)
    counts = torch.empty(num_counts(product.rows, shape.count), dtype=torch.int32, device=device)
    order(
        ids, shape.count, 0, 1, sorted_ids=choices, rows=rows, offsets=empty.offsets, counts=counts
    )
    weight = randn(device, *product.weight_shape).mul_(product.weight_shape[2] ** -0.5)
    filled = empty._replace(x=randn(device, *empty.x.shape), weight=weight)
    return filled._replace(choices=choices) if product.gathers else filled


def _reference(args: Arguments) -> Tensor:
    expected = torch.empty(args.out.shape, dtype=torch.float32, device=args.out.device)
    offsets = args.offsets.tolist()
    for expert, (begin, end) in enumerate(pairwise(offsets)):
        rows = slice(begin, end)
        x = args.x[rows] if args.choices is None else args.x[args.choices[rows].long() // args.k]
        y = x.float() @ args.weight[expert].float().T
        if args.choices is not None:
            gate, up = y.chunk(2, 1)
            y = functional.silu(gate) * up
        expected[rows] = y
    return expected


def _compile(product: Product, tile: TileConfig) -> str | None:
    """Why it failed, if it did."""
    try:
        _empty(product, torch.device("cuda")).call(tile)()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def _compiled(
    products: Sequence[Product], paths: Sequence[str], workers: int
) -> set[tuple[object, ...]]:
    """Compiles what differs, each in a process of its own. Returns what did not compile."""
    jobs = {
        _key(product, tile): (product, tile)
        for product in products
        for tile in product.tiles(paths)
    }
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        errors = list(pool.map(_compile, *zip(*jobs.values(), strict=True)))
    failed = set()
    for key, error in zip(jobs, errors, strict=True):
        if error is not None:
            print(f"{key}: {error}", flush=True)
            failed.add(key)
    print(f"{len(jobs)} kernels, {len(failed)} of which do not compile", flush=True)
    return failed


def _key(product: Product, tile: TileConfig) -> tuple[object, ...]:
    if isinstance(tile, GroupedTile):
        tile = replace(tile, programs_per_sm=1, group=1)
    elif isinstance(tile, HopperTile):
        tile = replace(tile, group=1)
    return product.model, product.gathers, tile


def _quick_us(call: Call) -> float:
    call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(_CALLS):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / _CALLS


def _measure(
    product: Product,
    paths: Sequence[str],
    failed: set[tuple[object, ...]],
    skewed: bool,
    device: torch.device,
) -> list[dict[str, object]]:
    """One row for each of the best tiles, and for the one that the op chooses."""
    args = _filled(product, device, skewed)
    expected = _reference(args)
    times: dict[TileConfig | None, float] = {}
    for tile in (None, *product.tiles(paths)):
        if tile is not None and _key(product, tile) in failed:
            continue
        args.out.fill_(float("nan"))
        call = args.call(tile)
        times[tile] = _quick_us(call)
        error = row_error(args.out, expected)
        if error > _TOLERANCE:
            print(f"{product.name} {tile}: WRONG, {error:.3g}", flush=True)
            del times[tile]
    best = sorted(times, key=lambda tile: times[tile])[:_BEST]
    best = [*best, *({None} & {*times} - {*best})]
    rounds = [make_round([args.call(tile)], device) for tile in best]
    rows = []
    for tile, us in sorted(
        zip(best, graph_us(rounds, device), strict=True), key=lambda pair: pair[1]
    ):
        rate = product.tflop / us * 1e6
        name = "own" if tile is None else type(tile).__name__
        rows.append(
            {"case": product.name + "_skewed" * skewed, "tile": name}
            | ({} if tile is None else asdict(tile))
            | {"us": round(us, 1), "tflops": round(rate, 1)}
        )
        print(f"{product.name:28} {us:8.1f} us {rate:6.1f} TFLOP/s  {tile or 'own'}", flush=True)
    return rows


_COLUMNS = (
    "case", "tile", "block_m", "block_n", "num_warps", "num_stages", "block_t", "programs_per_sm",
    "group", "us", "tflops",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.moe_many_tiles", description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the CSV to write")
    parser.add_argument("--filter", default="", help="only products whose name contains this")
    parser.add_argument("--paths", nargs="+", default=["portable", "hopper"])
    parser.add_argument("--skewed", action="store_true", help="half the tokens choose two experts")
    parser.add_argument("--workers", type=int, default=15, help="processes that compile")
    args = parser.parse_args(argv)
    products = [
        product
        for model, counts in _TOKENS.items()
        for tokens in counts
        for gathers in (True, False)
        if args.filter
        in (product := Product(model, FULL.expert_layers[model], tokens, gathers)).name
    ]
    device = torch.device("cuda")
    start = time.monotonic()
    failed = _compiled(products, args.paths, args.workers)
    print(f"compiled after {time.monotonic() - start:.0f} s", flush=True)
    with args.out.open("w", newline="") as file, torch.no_grad():
        writer = csv.DictWriter(file, _COLUMNS)
        writer.writeheader()
        for product in products:
            writer.writerows(_measure(product, args.paths, failed, args.skewed, device))
            file.flush()
    print(f"done after {time.monotonic() - start:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
