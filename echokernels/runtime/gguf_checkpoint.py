"""A GGUF file of the llama architecture, seen with Hugging Face names and layouts.

Method: GGUF stores the rows of the q and k projections of each head interleaved, (0, d/2, 1,
d/2 + 1, ...), for the rotary embedding that pairs neighbours. Models here pair i with i + d/2, so
the rows are put back in order. Quantised blocks become fp32 by the `gguf` package's formulas.
Source of names and formats: the GGUF specification and converters of the ggml project.
"""

from __future__ import annotations

import functools
from collections.abc import KeysView
from pathlib import Path

import numpy as np
import torch
from gguf import dequantize
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from echokernels.runtime.checkpoint import Checkpoint
from echokernels.runtime.gguf_config import ROPE_FACTORS_NAME, model_config
from echokernels.runtime.gguf_file import GGUFFile, GGUFTensor, read_gguf

_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_STORED_DTYPES = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


class GGUFCheckpoint(Checkpoint):
    """See `Checkpoint`. Raises ValueError for a damaged file or an unknown architecture or type."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = read_gguf(path)
        self.config = model_config(self._file)
        self._tensors = _hf_names(self._file)
        for tensor in self._tensors.values():
            _check_type(path, tensor)

    def names(self) -> KeysView[str]:
        return self._tensors.keys()

    def _read(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        weight = _to_torch(self._file.raw(tensor), tensor)
        heads = self._interleaved_heads(name)
        return weight if heads is None else deinterleave_heads(weight, heads)

    def _interleaved_heads(self, name: str) -> int | None:
        """The number of heads whose rows are interleaved in tensor `name`; None if not at all."""
        if ".q_proj." in name:
            return self.config.num_heads
        if ".k_proj." in name:
            return self.config.num_kv_heads
        return None


def deinterleave_heads(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows (0, d/2, 1, d/2 + 1, ...) of each head back to (0, 1, 2, ...). Returns a new tensor.

    `weight` is [num_heads * d, ...], the weight or the bias of a q or k projection.
    """
    pairs = weight.reshape(num_heads, -1, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _hf_names(file: GGUFFile) -> dict[str, GGUFTensor]:
    """Hugging Face name -> tensor. The rotary factors are configuration, so they are left out."""
    tensors = {}
    for name, tensor in file.tensors.items():
        if name == ROPE_FACTORS_NAME:
            continue
        hf_name = hf_tensor_name(name)
        if hf_name is None:
            known = ", ".join([*_TOP_NAMES, *(f"blk.N.{part}" for part in _LAYER_NAMES)])
            raise ValueError(f"{file.path}: tensor {name!r} is not known; known are {known}")
        tensors[hf_name] = tensor
    return tensors


def hf_tensor_name(gguf_name: str) -> str | None:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; None if unknown."""
    match gguf_name.split("."):
        case [part, ("weight" | "bias") as kind] if part in _TOP_NAMES:
            return f"{_TOP_NAMES[part]}.{kind}"
        case ["blk", layer, part, ("weight" | "bias") as kind] if part in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"
        case _:
            return None


def _to_torch(raw: np.ndarray, tensor: GGUFTensor) -> torch.Tensor:
    """u8[nbytes] -> the tensor: a view for float types, new fp32 memory for quantised ones."""
    dtype = _STORED_DTYPES.get(tensor.ggml_type)
    if dtype is not None:
        return torch.from_numpy(raw).view(dtype).reshape(tensor.shape)
    rows = raw.reshape(*tensor.shape[:-1], -1)
    return torch.from_numpy(dequantize(rows, tensor.ggml_type))


def _check_type(path: Path, tensor: GGUFTensor) -> None:
    if not _is_readable(tensor.ggml_type):
        allowed = ", ".join(t.name for t in GGMLQuantizationType if _is_readable(t))
        raise ValueError(
            f"{path}: tensor {tensor.name!r} has type {tensor.ggml_type.name}; "
            f"allowed are {allowed}"
        )


@functools.cache
def _is_readable(ggml_type: GGMLQuantizationType) -> bool:
    if ggml_type in _STORED_DTYPES:
        return True
    _, block_bytes = GGML_QUANT_SIZES[ggml_type]
    try:  # only trying it tells which types the package can dequantise
        dequantize(np.zeros((1, block_bytes), np.uint8), ggml_type)
    except NotImplementedError:
        return False
    return True
