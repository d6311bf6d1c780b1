"""Rows of results, the CSV file they go to, and the tables on the screen."""

import csv
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path

import torch
import triton
from rich.table import Table

OURS = "echo"
_ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Row:
    """One implementation of one case. Without a right result there are no times; see `note`."""

    op: str
    case: str
    impl: str
    graph_us: float | None = None
    eager_us: float | None = None
    rate: float | None = None  # by graph_us
    unit: str = ""  # of rate: TB/s or TFLOP/s
    share: float | None = None  # of the ceiling
    ok: bool = False
    error: float | None = None
    note: str = ""


def provenance(device: torch.device) -> dict[str, str]:
    """Where and when: columns that every row of a file has in common."""
    return {
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


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


def _text(value: object) -> object:
    return f"{value:.5g}" if isinstance(value, float) else value


def table(op: str, rows: Sequence[Row]) -> Table:
    """The rows of one op: a line for each case, a column for each implementation, the best bold."""
    impls = list(dict.fromkeys(row.impl for row in rows))
    result = Table(op, *impls, box=None)
    for case in dict.fromkeys(row.case for row in rows):
        of_case = {row.impl: row for row in rows if row.case == case}
        timed = [row.graph_us for row in of_case.values() if row.graph_us is not None]
        cells = (_cell(of_case.get(impl), min(timed, default=0.0)) for impl in impls)
        result.add_row(case, *cells)
    return result


def _cell(row: Row | None, best_us: float) -> str:
    if row is None:
        return ""
    if row.graph_us is None:
        return f"[red]{row.note.split(':')[0]}[/red]"
    cell = f"{row.graph_us:.1f}"
    if row.graph_us == best_us:
        cell = f"[bold]{cell}[/bold]"
    if row.rate is not None and row.share is not None:
        cell += f" ({row.rate:.3g}, {row.share:.0%})"
    return cell if row.eager_us is None else f"{cell} {row.eager_us:.0f}"
