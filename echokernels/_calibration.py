"""What `echokernels calibrate` measured on this machine's GPUs, kept in the user's cache folder.

One JSON file, by the name of the GPU. A file that is broken or of another version is ignored with a
warning; a new one is put in its place at once, so that a reader never finds half of it.
"""

import json
import os
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VERSION = 1
"""Of the file. Raised when what is kept changes its meaning."""

Entries = dict[str, dict[str, int]]
"""What was measured of one GPU: by kind of call, the figures that were best."""


def path() -> Path:
    """In $ECHOKERNELS_CACHE, or where programs of this user keep what can be made again."""
    folder = os.environ.get("ECHOKERNELS_CACHE")
    if folder is None:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = str(Path(cache) / "echokernels")
    return Path(folder) / "calibration.json"


def load(gpu: str) -> Entries:
    """The entries of a GPU, by its name; none if there is no file."""
    file = path()
    try:
        content = json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        _warn(file, str(error))
        return {}
    if not isinstance(content, dict) or content.get("version") != VERSION:
        _warn(file, f"its version is not {VERSION}")
        return {}
    try:
        return {
            key: {str(name): int(value) for name, value in entry.items()}
            for key, entry in content["gpus"].get(gpu, {}).items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        _warn(file, f"{type(error).__name__}: {error}")
        return {}


def save(gpu: str, entries: Mapping[str, Mapping[str, int]]) -> Path:
    """Replaces the entries of a GPU and keeps those of others. Returns the file."""
    file = path()
    file.parent.mkdir(parents=True, exist_ok=True)
    gpus: dict[str, Any] = {}
    try:
        content = json.loads(file.read_text())
        if content["version"] == VERSION:
            gpus = dict(content["gpus"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # what cannot be read cannot be kept
    gpus[gpu] = {key: dict(entry) for key, entry in entries.items()}
    content = {"version": VERSION, "gpus": gpus}
    descriptor, temporary = tempfile.mkstemp(dir=file.parent, prefix=file.name)
    try:
        with os.fdopen(descriptor, "w") as handle:
            json.dump(content, handle, indent=1, sort_keys=True)
        Path(temporary).replace(file)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return file


def _warn(file: Path, why: str) -> None:
    warnings.warn(
        f"{file} is ignored: {why}; run  echokernels calibrate  to make it anew", stacklevel=3
    )
