"""Small model files and tokenizers for tests, made on the spot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

# Heads differ in number from KV heads, so that swapping the two counts is seen. Every row is a
# multiple of 32 long, the block of the quantised types.
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
GGUF_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
CORPUS = [
    "The quick brown fox jumps over the lazy dog. 0123456789",
    "def f(x):\n    return x ** 2\n",
    "naïve café 世界 😀 don't",
    "the sea the sky the sun and the rain " * 3,
]


def random_weights(tied: bool = False, seed: int = 0) -> dict[str, torch.Tensor]:
    """All tensors of a model of `CONFIG`'s shape, fp32, with Hugging Face names."""
    gen = torch.Generator().manual_seed(seed)
    hidden, ffn, vocab, kv = 64, 96, 40, 32
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(2):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (hidden,),
                "self_attn.q_proj": (hidden, hidden),
                "self_attn.k_proj": (kv, hidden),
                "self_attn.v_proj": (kv, hidden),
                "self_attn.o_proj": (hidden, hidden),
                "post_attention_layernorm": (hidden,),
                "mlp.gate_proj": (ffn, hidden),
                "mlp.up_proj": (ffn, hidden),
                "mlp.down_proj": (hidden, ffn),
            }.items()
        }
    shapes["model.norm.weight"] = (hidden,)
    if not tied:
        shapes["lm_head.weight"] = (vocab, hidden)
    return {name: torch.randn(shape, generator=gen) for name, shape in shapes.items()}


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content))


def write_hf_folder(
    folder: Path, weights: dict[str, torch.Tensor], shards: int = 1, **config: Any
) -> Path:
    """`CONFIG`, changed by `config`, and `weights` in one file or in `shards` with an index."""
    folder.mkdir(exist_ok=True)
    write_json(folder / "config.json", CONFIG | config)
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    names = list(weights)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: weights[name] for name in names[shard::shards]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})
    return folder


def gguf_name(name: str) -> str:
    """`model.layers.1.self_attn.q_proj.weight` -> `blk.1.attn_q.weight`."""
    if name.startswith("model.layers."):
        _, _, layer, rest = name.split(".", 3)
        part, kind = rest.rsplit(".", 1)
        return f"blk.{layer}.{GGUF_PARTS[part]}.{kind}"
    tops = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    part, kind = name.rsplit(".", 1)
    return f"{tops[part]}.{kind}"


def interleave_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """The row order of q and k in GGUF: row i of a head's first half, then of its second."""
    half = weight.shape[0] // num_heads // 2
    rows = []
    for head in range(num_heads):
        for i in range(half):
            rows += [weight[2 * half * head + i], weight[2 * half * head + half + i]]
    return np.stack(rows)


def gguf_writer(path: Path, arch: str = "llama") -> gguf.GGUFWriter:
    """A writer that has the metadata of `CONFIG`'s shape and no tensor yet."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_block_count(2)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(50000.0)
    writer.add_rope_dimension_count(16)
    return writer


def add_gguf_weights(
    writer: gguf.GGUFWriter,
    weights: dict[str, torch.Tensor],
    ggml_type: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> None:
    """Adds `weights`, matrices as `ggml_type`, norms and biases as fp32 like real files."""
    for name, tensor in weights.items():
        array = tensor.numpy()
        for part, heads in ((".q_proj.", 4), (".k_proj.", 2)):
            if part in name:
                array = interleave_rows(array, heads)
        stored = ggml_type if array.ndim == 2 else gguf.GGMLQuantizationType.F32
        data = gguf.quantize(array, stored)
        # The writer knows NumPy's own types by themselves and wants to be told the others.
        native = stored in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16)
        writer.add_tensor(gguf_name(name), data, raw_dtype=None if native else stored)


def finish_gguf(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gguf(
    path: Path,
    weights: dict[str, torch.Tensor],
    ggml_type: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> Path:
    writer = gguf_writer(path)
    add_gguf_weights(writer, weights, ggml_type)
    finish_gguf(writer)
    return path


SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level_backend(vocab_size: int = 400) -> Tokenizer:
    """A byte-level BPE trained on `CORPUS`: ids 0 to 2 are `SPECIAL_TOKENS`, then all 256 bytes."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


# Scores fall with the id, as in real files; "▁the" can be cut in several ways.
SENTENCEPIECE_PIECES = [
    "▁t", "he", "▁the", "th", "in", "▁a", "re", "er", "▁th", "ing", "▁there",
    "▁", "e", "t", "a", "h", "i", "n", "r", "g", "o", "s", ".",
]  # fmt: skip


def sentencepiece_vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and GGUF token types: 3 special tokens, all bytes, `SENTENCEPIECE_PIECES`."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [2, 3, 3] + [6] * 256 + [1] * len(SENTENCEPIECE_PIECES)
    scores = [0.0] * len(tokens) + [-float(i) for i in range(len(SENTENCEPIECE_PIECES))]
    return tokens + SENTENCEPIECE_PIECES, scores, types
