"""A Hugging Face folder: `config.json` and weights in safetensors files.

The weights are one `model.safetensors`, or shards that `model.safetensors.index.json` lists:
{"weight_map": {tensor name: file name}}. Files are mapped, not read, until a tensor is used.
Pickled weights (`.bin`, `.pt`) are never opened, because loading a pickle runs code.
"""

from __future__ import annotations

from collections.abc import KeysView
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from echokernels.runtime.checkpoint import Checkpoint, check_architecture
from echokernels.runtime.config import ModelConfig
from echokernels.runtime.json_file import read_json, read_optional_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth")
_TIED_NAME = "lm_head.weight"


class HFCheckpoint(Checkpoint):
    """See `Checkpoint`. Raises ValueError for whatever is missing or damaged in the folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = read_config(path)
        self._file_of: dict[str, Any] = {}
        for file, names in _read_layout(path).items():
            self._file_of |= _open_weights(path / file, names)
        if self.config.tie_word_embeddings:
            # Some files carry a copy of the embedding under this name; tied models ignore it.
            self._file_of.pop(_TIED_NAME, None)
        elif _TIED_NAME not in self._file_of:
            raise ValueError(
                f"{path}: has no tensor {_TIED_NAME!r}, and config.json does not set "
                "tie_word_embeddings; one of the two is needed"
            )

    def names(self) -> KeysView[str]:
        return self._file_of.keys()

    def _read(self, name: str) -> torch.Tensor:
        return self._file_of[name].get_tensor(name)


def read_config(path: Path) -> ModelConfig:
    """The configuration of the folder `path`, which needs no weights. Raises ValueError."""
    fields = read_json(path / "config.json")
    check_architecture(path / "config.json", fields.get("model_type"))
    # The ids that end a generation are in generation_config.json if that exists: a chat model
    # often ends its turn with another token than the one that ended its training documents.
    eos_token_id = read_optional_json(path / "generation_config.json").get("eos_token_id")
    if eos_token_id is not None:
        fields["eos_token_id"] = eos_token_id
    try:
        return ModelConfig.from_hf(fields)
    except (TypeError, ValueError) as exc:
        raise ValueError(f"{path / 'config.json'}: {exc}") from exc


def _read_layout(path: Path) -> dict[str, list[str]]:
    """File name -> names of its tensors (empty: all that it holds)."""
    if (path / INDEX_FILE).is_file():
        return _read_index(path / INDEX_FILE)
    if (path / SINGLE_FILE).is_file():
        return {SINGLE_FILE: []}
    pickles = sorted(file.name for pattern in _PICKLE_PATTERNS for file in path.glob(pattern))
    found = "no weights"
    if pickles:
        found = f"only pickled weights ({pickles[0]}), which are never loaded as they can run code"
    elif shards := sorted(file.name for file in path.glob("*.safetensors")):
        found = f"{shards[0]} without an index"
    raise ValueError(f"{path}: found {found}; {SINGLE_FILE} or {INDEX_FILE} is needed")


def _read_index(index: Path) -> dict[str, list[str]]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: 'weight_map' must be an object of tensor name -> file name")
    layout: dict[str, list[str]] = {}
    for name, file in sorted(weight_map.items(), key=lambda item: str(item[1])):
        # Checked as text, not by resolving it: in a download cache the shards themselves are
        # links that leave the folder.
        if not _is_plain_name(file):
            raise ValueError(
                f"{index}: tensor {name!r} is in {file!r}; shards must be .safetensors files, "
                "named without a folder"
            )
        if not (index.parent / file).is_file():
            raise ValueError(f"{index}: tensor {name!r} is in {file!r}, which is missing")
        layout.setdefault(file, []).append(name)
    return layout


def _is_plain_name(file: object) -> bool:
    if not isinstance(file, str) or "\\" in file:
        return False
    return Path(file).name == file and file.endswith(".safetensors")


def _open_weights(file: Path, names: list[str]) -> dict[str, Any]:
    """Tensor name -> the open file, for `names`, or for all that it holds if there are none."""
    try:
        weights = safe_open(file, framework="pt", device="cpu")
    except (OSError, SafetensorError) as exc:
        raise ValueError(f"{file}: not a usable safetensors file: {exc}") from exc
    stored = set(weights.keys())
    if missing := sorted(set(names) - stored):
        raise ValueError(
            f"{file}: has no tensor {missing[0]!r}, which {INDEX_FILE} says is there; "
            f"it has {len(stored)} tensors"
        )
    return dict.fromkeys(names or weights.keys(), weights)
