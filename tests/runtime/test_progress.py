"""Progress bars: on a terminal only, and with what they promise to show."""

from __future__ import annotations

import io
from contextlib import redirect_stderr

import pytest

from echokernels.runtime.progress import progress_bar, warmup_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")


def test_requests_and_rate() -> None:
    with redirect_stderr(Terminal()) as stderr, progress_bar(3, shown=True) as show:
        show(1, 10)
        show(3, 20)
    for text in ("requests", "3/3", "tokens/s"):
        assert text in stderr.getvalue()


def test_warm_up() -> None:
    with redirect_stderr(Terminal()) as stderr, warmup_bar() as show:
        for done in range(8):
            show(done, 7)
    for text in ("warm-up", "7/7"):
        assert text in stderr.getvalue()


def test_nothing_unless_shown_on_a_terminal() -> None:
    with redirect_stderr(Terminal()) as stderr, progress_bar(3, shown=False) as show:
        show(3, 20)
    assert stderr.getvalue() == ""
    with (
        redirect_stderr(io.StringIO()) as file,
        progress_bar(3, shown=True) as show,
        warmup_bar() as show_warmup,
    ):
        show(3, 20)
        show_warmup(7, 7)
    assert file.getvalue() == ""
