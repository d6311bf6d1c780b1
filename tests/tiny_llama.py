"""A Llama for tests, small enough to run thousands of steps, from transformers: also its oracle."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

TINY: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 0,
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|user|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|bot|>{% endif %}"
)


def tiny_llama(seed: int = 0, std: float = 0.2, **changes: Any) -> LlamaForCausalLM:
    """A model of `TINY`, changed by `changes`, in fp32; no bias is 0 and no norm's weight 1."""
    model = LlamaForCausalLM(LlamaConfig(**(TINY | changes))).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        # 0.2 is large enough that the likeliest token leads by far more than fp32 rounding.
        parameter.normal_(1.0 if "norm" in name else 0.0, std, generator=generator)
    return model


def save(model: LlamaForCausalLM, folder: Path, tokenizer: bool = True) -> Path:
    """`model` as a Hugging Face folder, with a tokenizer of one token per printable character."""
    model.save_pretrained(folder)
    if tokenizer:
        _character_tokenizer().save(str(folder / "tokenizer.json"))
        content = {"eos_token": "<|end|>", "chat_template": CHAT_TEMPLATE}
        (folder / "tokenizer_config.json").write_text(json.dumps(content))
    return folder


def greedy(model: LlamaForCausalLM, prompt: list[int], num_tokens: int) -> list[int]:
    """What `model` goes on with, past any stop token. No cache: each step computes everything."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(int(model(torch.tensor([token_ids])).logits[0, -1].argmax()))
    return token_ids[len(prompt) :]


@functools.cache
def _character_tokenizer() -> Tokenizer:
    # "Ġ" is how byte-level tokenizers write the space.
    characters = ["Ġ", *map(chr, range(0x21, 0x7F))]
    specials = ["<|end|>", "<|user|>", "<|bot|>"]
    vocabulary = {token: index for index, token in enumerate(specials + characters)}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in specials])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend
