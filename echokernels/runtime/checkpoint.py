"""Model files: a configuration and named weights, whatever the format on disk.

Two formats are read, neither of which can run code: a Hugging Face folder (`config.json` and
safetensors) and a GGUF file. Tensor names are always those of Hugging Face, such as
`model.layers.0.self_attn.q_proj.weight`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, KeysView
from pathlib import Path

import torch

from echokernels.runtime.config import ModelConfig

SUPPORTED_ARCHITECTURES = ("llama",)


class Checkpoint(ABC):
    """An open model. Weights are read one at a time, when asked for.

    If `config.tie_word_embeddings`, there is no `lm_head.weight`: the embedding serves as both.
    Otherwise there always is one.
    """

    path: Path
    config: ModelConfig

    @abstractmethod
    def names(self) -> KeysView[str]:
        """The names of all tensors, in the order in which reading them is cheapest."""

    @abstractmethod
    def _read(self, name: str) -> torch.Tensor:
        """The tensor `name`, one of `names()`."""

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor `name` on the CPU: as stored if stored as numbers, fp32 if it was quantised.

        It may share memory with the mapped file; copy it before changing it. Raises ValueError if
        there is no such tensor.
        """
        if name not in self.names():
            raise ValueError(
                f"{self.path}: has no tensor {name!r}; it has {len(self)} tensors: "
                f"{', '.join([*self.names()][:3])}, ..."
            )
        return self._read(name)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All `len(self)` pairs of name and tensor, each read when the iterator reaches it."""
        for name in self.names():
            yield name, self._read(name)

    def __len__(self) -> int:
        return len(self.names())


def check_architecture(where: Path, architecture: object) -> None:
    """Raises ValueError if `architecture`, found in the file `where`, has no model here."""
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise ValueError(
            f"{where}: architecture is {architecture!r}, must be one of "
            f"{', '.join(SUPPORTED_ARCHITECTURES)}"
        )


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Opens a Hugging Face folder or a `.gguf` file; no weight is read yet.

    Raises ValueError, with the path, what was found and what is allowed, if the model is missing,
    damaged, in another format or of an unknown architecture.
    """
    path = Path(path)
    # The readers import optional packages, so that each format needs only its own.
    if path.is_dir():
        from echokernels.runtime.hf_checkpoint import HFCheckpoint

        return HFCheckpoint(path)
    if path.is_file() and path.suffix == ".gguf":
        from echokernels.runtime.gguf_checkpoint import GGUFCheckpoint

        return GGUFCheckpoint(path)
    found = "a file of another kind" if path.exists() else "nothing there"
    raise ValueError(
        f"model path {str(path)!r}: found {found}; it must be a folder with config.json and "
        "safetensors files, or a .gguf file"
    )
