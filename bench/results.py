"""Rows of results, the CSV file they go to, and the tables on the screen."""

import csv
import os
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch
import triton
from rich.table import Table

OURS = "echo"
CEILING = "ceiling"  # as an op: what the device can do
RESULTS = Path(__file__).parent / "results"
_ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Row:
    """One implementation of one case. Without a right result there are no times; see `note`."""

    op: str
    case: str
    impl: str
    graph_us: float | None = None
    host_us: float | None = None
    rate: float | None = None
    unit: str = ""  # of rate: TB/s, TFLOP/s, tokens/s or x torch.add
    share: float | None = None  # of the ceiling
    ok: bool = False
    error: float | None = None
    note: str = ""

    @property
    def us(self) -> float | None:
        """What was timed: the device or the host."""
        return self.host_us if self.graph_us is None else self.graph_us


def provenance(device: torch.device) -> dict[str, str]:
    """Where and when: columns that every row of a file has in common."""
    return {
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def default_path(kind: str, gpu: str, quick: bool) -> Path:
    """bench/results/<kind>-<gpu>.csv: "ops" and "NVIDIA H200" give ops-h200.csv.

    Quick results mean nothing: they go to the folder for temporary files.
    """
    name = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).removeprefix("nvidia-")
    return (Path(gettempdir()) if quick else RESULTS) / f"{kind}-{name}.csv"


def commit() -> str:
    """ECHO_COMMIT, for a tree copied without its repository; else what git says; else "unknown"."""
    if "ECHO_COMMIT" in os.environ:
        return os.environ["ECHO_COMMIT"]
    command = ["git", "-C", str(_ROOT), "rev-parse", "--verify", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


class ResultsFile:
    """A CSV file that holds every row written so far, whatever happens next.

    With `keep` the rows of an older file stay, except those of cases that are measured again, which
    the new ones replace in their place; and its ceilings, while there are rows of their commit.
    """

    def __init__(self, path: Path, common: Mapping[str, str], *, keep: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._common = path, common
        self._lines = _read_lines(path) if keep and path.exists() else []
        self._save()

    def write(self, rows: Iterable[Row]) -> None:
        """`rows` are all of their cases."""
        lines = [
            {**{name: _text(value) for name, value in asdict(row).items()}, **self._common}
            for row in rows
        ]
        for key, of_case in groupby(lines, _case_of):
            self._replace(key, list(of_case))
        self._save()

    def _replace(self, key: tuple[str, ...], lines: list[dict[str, Any]]) -> None:
        same_op = [index for index, line in enumerate(self._lines) if line["op"] == key[0]]
        same_case = [index for index in same_op if _case_of(self._lines[index]) == key]
        end = same_op[-1] + 1 if same_op else len(self._lines)
        start = same_case[0] if same_case else end
        before = self._lines[:start]
        after = [line for line in self._lines[start:] if _case_of(line) != key]
        self._lines = [*before, *lines, *after]

    def _save(self) -> None:
        commits = {line.get("commit") for line in self._lines if line["op"] != CEILING}
        commits.add(self._common.get("commit"))
        names = [*(field.name for field in fields(Row)), *self._common]
        lines = [
            line for line in self._lines if line["op"] != CEILING or line.get("commit") in commits
        ]
        # At once: a file that is half written would lose what was there before.
        temporary = self._path.with_suffix(".partial")
        with temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, names, lineterminator="\n", extrasaction="ignore")
            writer.writeheader()
            writer.writerows(lines)
        temporary.replace(self._path)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _case_of(line: Mapping[str, Any]) -> tuple[str, ...]:
    """What is measured together. Ceilings are those of a commit."""
    of_commit = [line.get("commit", "")] if line["op"] == CEILING else []
    return (line["op"], line["case"], *of_commit)


def read_rows(path: Path) -> list[Row]:
    """The rows of a file that `ResultsFile` wrote. Columns that rows no longer have are ignored.

    Raises FileNotFoundError.
    """
    with path.open(newline="") as file:
        return [
            Row(**{f.name: _value(f.name, line.get(f.name, "")) for f in fields(Row)})
            for line in csv.DictReader(file)
        ]


def _text(value: object) -> object:
    return f"{value:.5g}" if isinstance(value, float) else value


def _value(name: str, text: str) -> Any:
    if name in ("op", "case", "impl", "unit", "note"):
        return text
    if name == "ok":
        return text == "True"
    return float(text) if text else None


def table(op: str, rows: Sequence[Row]) -> Table:
    """The rows of one op: a line for each case, a column for each implementation, the best bold."""
    impls = list(dict.fromkeys(row.impl for row in rows))
    result = Table(op, *impls, box=None)
    for case in dict.fromkeys(row.case for row in rows):
        of_case = {row.impl: row for row in rows if row.case == case}
        timed = [us for row in of_case.values() if (us := row.us) is not None]
        cells = (_cell(of_case.get(impl), min(timed, default=0.0)) for impl in impls)
        result.add_row(case, *cells)
    return result


def _cell(row: Row | None, best_us: float) -> str:
    if row is None:
        return ""
    if row.us is None or row.rate is None:
        return f"[red]{row.note.split(':')[0]}[/red]"
    cell = f"{row.us:.1f}"
    if row.us == best_us:
        cell = f"[bold]{cell}[/bold]"
    share = "" if row.share is None else f", {row.share:.0%}"
    return f"{cell} ({row.rate:.3g}{share})"
