"""Plots of the committed results: `python -m bench.plot` writes docs/plots/*.svg.

Decode: bandwidth against the length of the contexts, a line for each batch of one length, under the
roof of a streaming read; and every case beside the best peer, by its share of that roof. The ladder
of `bench.ladder`: time and scratch memory of each design.
"""

import csv
import re
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.ladder import HEAD_DIM, KV_HEADS
from bench.prefill import BF16
from bench.report import PLOTS
from bench.results import CEILING, OURS, RESULTS

Rows = list[dict[str, str]]


def main() -> None:
    # The same results give the same file.
    mpl.rcParams |= {"svg.hashsalt": "echokernels", "svg.fonttype": "none"}
    PLOTS.mkdir(exist_ok=True)
    for path in plots(RESULTS, PLOTS):
        print(path)


def plots(results: Path, folder: Path) -> Iterable[Path]:
    """Draws what there are results for. Returns the files."""
    for path in sorted(results.glob("ops-*.csv")):
        rows = _read(path)
        if decodes := [row for row in rows if row["op"] == "paged_attention"]:
            yield _save(decode(decodes, _roof(rows, decodes)), folder, f"decode-{_gpu(path)}")
    for path in sorted(results.glob("ladder-*.csv")):
        yield _save(ladder(_read(path)), folder, path.stem)


def _read(path: Path) -> Rows:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _gpu(path: Path) -> str:
    return path.stem.partition("-")[2]


def _roof(rows: Rows, decodes: Rows) -> float:
    """The streaming read of the run that measured `decodes`, in TB/s."""
    commits = {row["commit"] for row in decodes}
    return max(
        float(row["rate"])
        for row in rows
        if row["op"] == CEILING and row["case"].startswith("read") and row["commit"] in commits
    )


def decode(rows: Rows, roof: float) -> Figure:
    figure = Figure((11, 4.5), layout="constrained")
    by_length, by_case = figure.subplots(1, 2)
    _by_length(by_length, rows)
    by_length.set_ylim(0, 1.05 * roof)
    by_length.axhline(roof, color="black", linestyle=":", label="streaming read")
    by_length.legend(fontsize="small")
    _by_case(by_case, rows, roof)
    return figure


def _by_length(axes: Axes, rows: Rows) -> None:
    points = []
    for row in rows:
        plain = re.fullmatch(r"(\d+)x(\d+)k_h32/8", row["case"])
        if plain and row["impl"] == OURS and row["rate"]:
            points.append((int(plain[1]), int(plain[2]) * 1024, float(row["rate"])))
    for batch, group in groupby(sorted(points), lambda point: point[0]):
        _, lengths, rates = zip(*group, strict=True)
        axes.plot(lengths, rates, marker="o", label=f"batch {batch}")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("keys of each sequence")
    axes.set_ylabel("TB/s")
    axes.set_title("32/8 heads, head dim 128")


def _by_case(axes: Axes, rows: Rows, roof: float) -> None:
    """Shares of the roof: ours, and the best of all others."""
    names, ours, others = [], [], []
    for case, group in groupby(rows, lambda row: row["case"]):
        rates = {row["impl"]: float(row["rate"]) / roof for row in group if row["rate"]}
        names.append(case)
        ours.append(rates.get(OURS, 0.0))
        others.append(max((r for i, r in rates.items() if not i.startswith(OURS)), default=0.0))
    places = range(len(names))
    axes.barh([p - 0.2 for p in places], ours, 0.4, label=OURS)
    axes.barh([p + 0.2 for p in places], others, 0.4, label="best peer", color="lightgray")
    axes.set_yticks(places, names, fontsize="x-small")
    axes.invert_yaxis()
    axes.axvline(1, color="black", linestyle=":")
    axes.set_xlabel("share of a streaming read")
    axes.legend(fontsize="small")


def ladder(rows: Rows) -> Figure:
    figure = Figure((11, 4), layout="constrained")
    time, scratch = figure.subplots(1, 2)
    for impl in dict.fromkeys(row["impl"] for row in rows):
        of_impl = [row for row in rows if row["impl"] == impl and row["graph_us"]]
        lengths = [int(row["case"]) for row in of_impl]
        label = "paged_attention" if impl == OURS else impl
        time.plot(lengths, [float(row["graph_us"]) for row in of_impl], marker=".", label=label)
        scratch.plot(lengths, [float(row["rate"]) for row in of_impl], marker=".", label=label)
    keys = sorted({int(row["case"]) for row in rows})
    scratch.plot(
        keys, [2 * n * KV_HEADS * HEAD_DIM * BF16 for n in keys], ":k", label="the cache itself"
    )
    for axes, what in ((time, "us"), (scratch, "bytes of scratch")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("keys of one sequence")
        axes.set_ylabel(what)
        axes.legend(fontsize="small")
    scratch.set_yscale("symlog", linthresh=1e5)
    scratch.set_ylim(bottom=-1e4)
    return figure


def _save(figure: Figure, folder: Path, name: str) -> Path:
    path = folder / f"{name}.svg"
    figure.savefig(path, metadata={"Date": None})
    return path


if __name__ == "__main__":
    main()
