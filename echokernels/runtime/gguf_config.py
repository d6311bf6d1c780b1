"""The `ModelConfig` that the metadata of a GGUF file of the llama architecture describes."""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf import dequantize
from gguf.constants import GGMLQuantizationType

from echokernels.runtime.checkpoint import check_architecture
from echokernels.runtime.config import ModelConfig
from echokernels.runtime.gguf_file import GGUFFile

ROPE_FACTORS_NAME = "rope_freqs.weight"

_DTYPE_NAMES = {GGMLQuantizationType.F16: "float16", GGMLQuantizationType.BF16: "bfloat16"}
# The end of the text, of a turn, and of a message that calls a tool.
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def model_config(file: GGUFFile) -> ModelConfig:
    """Raises ValueError, with the path, for another architecture or missing or odd metadata."""
    architecture = file.require("general.architecture", str)
    check_architecture(file.path, architecture)
    if (parts := file.get("split.count", int, 1)) > 1:
        raise ValueError(f"{file.path}: one of {parts} parts; only GGUF files in one part are read")
    fields = _fields(file, architecture)
    try:
        config = ModelConfig(**fields)
    except (TypeError, ValueError) as exc:
        raise ValueError(f"{file.path}: {exc}") from exc
    _check_rotary(file, architecture, config.head_dim)
    return config


def _fields(file: GGUFFile, arch: str) -> dict[str, Any]:
    hidden_size = file.require(f"{arch}.embedding_length", int)
    num_heads = file.require(f"{arch}.attention.head_count", int)
    # No heads at all are for ModelConfig to refuse.
    head_dim = file.get(f"{arch}.attention.key_length", int, hidden_size // max(num_heads, 1))
    return {
        "architecture": arch,
        "vocab_size": _vocab_size(file),
        "hidden_size": hidden_size,
        "intermediate_size": file.require(f"{arch}.feed_forward_length", int),
        "num_layers": file.require(f"{arch}.block_count", int),
        "num_heads": num_heads,
        "num_kv_heads": file.get(f"{arch}.attention.head_count_kv", int, num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": _decimal(file.require(f"{arch}.attention.layer_norm_rms_epsilon", float)),
        "rope_theta": _decimal(file.get(f"{arch}.rope.freq_base", float, 10000.0)),
        "rope_scaling": _rope_scaling(file, arch, head_dim),
        "max_position_embeddings": file.require(f"{arch}.context_length", int),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "bos_token_id": bos_token_id(file),
        "eos_token_ids": eos_token_ids(file),
        "torch_dtype": _torch_dtype(file),
    }


def bos_token_id(file: GGUFFile) -> int | None:
    return file.get("tokenizer.ggml.bos_token_id", int)


def eos_token_ids(file: GGUFFile) -> tuple[int, ...]:
    ids = [file.get(f"tokenizer.ggml.{key}", int) for key in _EOS_KEYS]
    return tuple(dict.fromkeys(token_id for token_id in ids if token_id is not None))


def _vocab_size(file: GGUFFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ValueError(f"{file.path}: tensor 'token_embd.weight' of rank 2 is missing")
    return embedding.shape[0]


def _torch_dtype(file: GGUFFile) -> str:
    """The dtype in which the projections come out of the checkpoint."""
    projection = file.tensors.get("blk.0.attn_q.weight")
    return _DTYPE_NAMES.get(projection.ggml_type, "float32") if projection else "float32"


def _check_rotary(file: GGUFFile, arch: str, head_dim: int) -> None:
    for key in ("rope.dimension_count", "attention.value_length"):
        value = file.get(f"{arch}.{key}", int, head_dim)
        if value != head_dim:
            raise ValueError(
                f"{file.path}: metadata '{arch}.{key}' is {value}; it must be {head_dim=}"
            )


def _rope_scaling(file: GGUFFile, arch: str, head_dim: int) -> dict[str, Any] | None:
    """Hugging Face's `rope_scaling`, plus the type "factors" for llama 3.

    A llama 3 GGUF has no parameters of its frequency scaling but the result, one factor per pair:
    inv_freq[i] = theta^(-2i/d) / factors[i].
    """
    kind = file.get(f"{arch}.rope.scaling.type", str, "none")
    factors = file.tensors.get(ROPE_FACTORS_NAME)
    if factors is not None:
        if factors.shape != (head_dim // 2,) or kind != "none":
            raise ValueError(
                f"{file.path}: tensor {ROPE_FACTORS_NAME!r} has shape {factors.shape} with rope "
                f"scaling {kind!r}; allowed is ({head_dim // 2},) with 'none'"
            )
        values = dequantize(file.raw(factors), factors.ggml_type)
        return {"rope_type": "factors", "factors": values.tolist()}
    if kind == "linear":
        return {"rope_type": "linear", "factor": file.require(f"{arch}.rope.scaling.factor", float)}
    if kind != "none":
        raise ValueError(
            f"{file.path}: metadata '{arch}.rope.scaling.type' is {kind!r}; supported are 'none', "
            f"'linear' and factors in {ROPE_FACTORS_NAME!r}"
        )
    return None


def _decimal(value: float) -> float:
    """The decimal number its author wrote: 1e-5, not fp32's 9.999999747378752e-06."""
    return float(str(np.float32(value)))
