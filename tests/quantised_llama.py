"""What a Llama computes over a KV cache of codes, in plain PyTorch: the oracle of such caches.

Keys after RoPE and values go through codes, one scale for each token and KV head, and attention
sees what comes back. There is no cache and no page: every token's keys and values are quantised
alike, whichever step computed them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import AttentionInterface, LlamaForCausalLM

from tests.ops.quant_oracle import LIMITS, round_to

CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""By `kv_cache_dtype`."""


def with_cache_of(model: LlamaForCausalLM, kv_cache_dtype: str) -> LlamaForCausalLM:
    """`model` itself, changed to attend as over a cache of `kv_cache_dtype`."""
    if kv_cache_dtype != "auto":
        name = f"over {kv_cache_dtype} codes"
        AttentionInterface.register(
            name, functools.partial(attend, code_dtype=CODES[kv_cache_dtype])
        )
        model.set_attn_implementation(name)
    return model


def attend(
    _module: torch.nn.Module,
    query: torch.Tensor,  # [1, heads, tokens, head_dim]
    key: torch.Tensor,  # [1, kv_heads, tokens, head_dim]
    value: torch.Tensor,
    *_mask: Any,
    scaling: float,
    code_dtype: torch.dtype,
    **_options: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention, as transformers calls for it: [1, tokens, heads, head_dim]."""
    groups = query.shape[1] // key.shape[1]
    key, value = (
        through_codes(x, code_dtype).repeat_interleave(groups, dim=1) for x in (key, value)
    )
    scores = query @ key.transpose(-1, -2) * scaling
    hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return (weights @ value).transpose(1, 2), None


def through_codes(x: torch.Tensor, code_dtype: torch.dtype) -> torch.Tensor:
    scale = (x.abs().amax(-1, keepdim=True) / LIMITS[code_dtype]).clamp_min(1e-12)
    return round_to((x / scale).double(), code_dtype).to(x.dtype) * scale
