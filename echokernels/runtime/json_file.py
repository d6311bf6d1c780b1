"""Reading the small JSON files beside a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# The largest real ones, weight indices of the biggest models, have some 10 MB.
MAX_JSON_BYTES = 1 << 26


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises ValueError, with the path, if there is none."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise ValueError(f"{path}: {size} bytes; at most {MAX_JSON_BYTES} are allowed")
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{path}: file not found") from None
    except (OSError, json.JSONDecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ValueError(f"{path}: cannot be read as JSON: {exc}") from exc
    if not isinstance(content, dict):
        raise ValueError(f"{path}: holds a JSON {type(content).__name__}; it must be an object")
    return content


def read_optional_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, or an empty one if there is no such file."""
    return read_json(path) if path.is_file() else {}
