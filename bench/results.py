"""Rows of results, the CSV file they go to, and the tables on the screen."""

import csv
import os
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch
import triton
from rich.table import Table

OURS = "echo"
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
    """A CSV file that holds every row written so far, whatever happens next."""

    def __init__(self, path: Path, common: Mapping[str, str]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._common = common
        self._file = path.open("w", newline="")
        names = [*(field.name for field in fields(Row)), *common]
        self._writer = csv.DictWriter(self._file, names, lineterminator="\n")
        self._writer.writeheader()

    def write(self, rows: Iterable[Row]) -> None:
        for row in rows:
            values = {name: _text(value) for name, value in asdict(row).items()}
            self._writer.writerow({**values, **self._common})
        self._file.flush()

    def __enter__(self) -> "ResultsFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


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
