"""Progress bars on stderr: of `LLM.generate`, requests done and tokens per second; of warm-up."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


@contextmanager
def progress_bar(total: int, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """Gives a function to call after each step: (requests done in all, tokens since the last call).

    Nothing is printed unless `shown` and stderr is a terminal.
    """
    if not shown or not sys.stderr.isatty():
        yield lambda _done, _new_tokens: None
        return
    start, num_tokens = time.perf_counter(), 0
    with _bar("requests", "{task.fields[rate]:.1f} tokens/s") as progress:
        task = progress.add_task("", total=total, rate=0.0)

        def show(done: int, new_tokens: int) -> None:
            nonlocal num_tokens
            num_tokens += new_tokens
            rate = num_tokens / (time.perf_counter() - start)
            progress.update(task, completed=done, rate=rate)

        yield show


@contextmanager
def warmup_bar() -> Iterator[Callable[[int, int], None]]:
    """Gives a function to call with (batches done, of how many). Only a terminal shows it."""
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    with _bar("warm-up") as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _bar(label: str, *more: str) -> Progress:
    # Here, for nothing but a bar on a terminal needs it.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(label), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, *map(TextColumn, more), console=Console(stderr=True))
