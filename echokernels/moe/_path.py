"""Which kernels multiply rows of experts where there are several: for tests and measurements."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

from echokernels._replay import bypass

Path = Literal["auto", "portable", "hopper"]

_path: ContextVar[Path] = ContextVar("echokernels_moe_path", default="auto")


@contextmanager
def forced_path(path: Path) -> Iterator[None]:
    """Within the context, grouped products run the portable kernel, or the one for Hopper wherever
    it can."""
    token = _path.set(path)
    try:
        with bypass():
            yield
    finally:
        _path.reset(token)


def current_path() -> Path:
    return _path.get()
