"""Tile choice: explicit argument > calibrated table > pure heuristic.

A kernel's `_config` is the heuristic, a pure function of shapes and `Target`. `select` lets two
things stand above it: a configuration forced for a while (`forced`, used by sweeps and tests) and
one measured on this device (`calibrate`). Nothing here times anything: no user's first request pays
for tuning.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from echokernels import _replay


@dataclass(frozen=True)
class TileConfig:
    """The shape of one program: a tile of `block_m` rows by `block_n` columns (what they are, the
    op says)."""

    block_m: int
    block_n: int
    num_warps: int = 4
    num_stages: int = 1


_forced: ContextVar[dict[str, TileConfig] | None] = ContextVar("echokernels_forced", default=None)
_calibrated: dict[tuple[str, Hashable], TileConfig] = {}


def select(op: str, key: Hashable, heuristic: Callable[[], TileConfig]) -> TileConfig:
    """The configuration of `op` for `key`, which names everything that its heuristic depends on."""
    forced_configs = _forced.get()
    if forced_configs and op in forced_configs:
        return forced_configs[op]
    return _calibrated.get((op, key)) or heuristic()


@contextmanager
def forced(op: str, config: TileConfig) -> Iterator[None]:
    """Within the context, `op` runs with `config` whatever its heuristic says."""
    token = _forced.set({**(_forced.get() or {}), op: config})
    try:
        with _replay.bypass():
            yield
    finally:
        _forced.reset(token)


def calibrate(op: str, key: Hashable, config: TileConfig) -> None:
    """Makes `config`, measured on this machine, the choice of `op` for `key` in this process."""
    _calibrated[op, key] = config
    _replay.forget()
