"""Llama (Touvron et al., "LLaMA", 2023, arXiv:2302.13971, and its successors): pre-norm, RoPE, GQA
and SwiGLU.

    h = h + attention(norm(h))
    h = h + down(silu(gate(norm(h))) * up(norm(h)))

The sum is carried as `residual`, so that each addition is fused with the norm after it. Modules are
named as in Hugging Face checkpoints. Shapes are [tokens, ...]: the tokens of all sequences, one
after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from echokernels.runtime.config import ModelConfig
from echokernels.runtime.layers import (
    Attention,
    AttentionMetadata,
    Embedding,
    GateUpProjection,
    KVCache,
    Linear,
    Placement,
    QKVProjection,
    RMSNorm,
    rotary_table,
)


class LlamaAttention(nn.Module):
    def __init__(self, config: ModelConfig, cos_sin_cache: torch.Tensor, place: Placement) -> None:
        super().__init__()
        self.qkv_proj = QKVProjection(config, cos_sin_cache, place)
        self.attention = Attention(config.head_dim)
        q_size = config.num_heads * config.head_dim
        self.o_proj = Linear(q_size, config.hidden_size, config.attention_bias, place)

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        cache: KVCache,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        q = self.qkv_proj(x, positions, cache, metadata.slot_mapping)
        return self.o_proj(self.attention(q, cache, metadata).flatten(1))


class LlamaMLP(nn.Module):
    def __init__(self, config: ModelConfig, place: Placement) -> None:
        super().__init__()
        self.gate_up_proj = GateUpProjection(config, place)
        self.down_proj = Linear(
            config.intermediate_size, config.hidden_size, config.mlp_bias, place
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.gate_up_proj(x))


class LlamaDecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, cos_sin_cache: torch.Tensor, place: Placement) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, place)
        self.self_attn = LlamaAttention(config, cos_sin_cache, place)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, place)
        self.mlp = LlamaMLP(config, place)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        cache: KVCache,
        metadata: AttentionMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, positions, cache, metadata)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class LlamaModel(nn.Module):
    def __init__(self, config: ModelConfig, place: Placement) -> None:
        super().__init__()
        cos_sin_cache = rotary_table(config, place)
        self.embed_tokens = Embedding(
            config.vocab_size, config.hidden_size, config.tie_word_embeddings, place
        )
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(config, cos_sin_cache, place) for _ in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, place)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: Sequence[KVCache],
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        x, residual = self.embed_tokens(input_ids), None
        for layer, cache in zip(self.layers, caches, strict=True):
            x, residual = layer(x, residual, positions, cache, metadata)
        return self.norm(x, residual)[0]


class LlamaForCausalLM(nn.Module):
    """Its parameters are uninitialised: load or fill them before the first call."""

    def __init__(self, config: ModelConfig, place: Placement) -> None:
        super().__init__()
        self.model = LlamaModel(config, place)
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else Linear(config.hidden_size, config.vocab_size, False, place)
        )

    def forward(
        self,
        input_ids: torch.Tensor,  # i32[tokens]
        positions: torch.Tensor,  # i32[tokens]
        caches: Sequence[KVCache],  # one for each layer, written to
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """The last hidden states, [tokens, hidden_size]."""
        return self.model(input_ids, positions, caches, metadata)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden_size] -> [rows, vocab_size], for the rows that are to be sampled."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return nn.functional.linear(hidden, head.weight)
