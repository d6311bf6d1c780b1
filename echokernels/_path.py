"""Which kernels attention and grouped products run where there are several: for tests and
measurements."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

from echokernels._replay import bypass

Path = Literal["auto", "portable", "hopper"]

_path: ContextVar[Path] = ContextVar("echokernels_path", default="auto")


@contextmanager
def forced_path(path: Path) -> Iterator[None]:
    """Within the context, these ops run the portable kernels, or those for Hopper wherever they
    can."""
    token = _path.set(path)
    try:
        with bypass():
            yield
    finally:
        _path.reset(token)


def current_path() -> Path:
    return _path.get()
