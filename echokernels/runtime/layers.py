"""The layers that models are put together from. Inference only: no parameter takes a gradient.

Everything but the matrix products and the embedding runs through `torch.ops.echo.*`. A layer gets
what it needs as arguments: the step's `AttentionMetadata` and its own pages of the KV cache are
passed in, never looked up. Parameters have the names and layouts of Hugging Face's, except that
projections of one input are packed into one weight, and so one product.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

import echokernels
from echokernels.runtime.batch import AttentionMetadata
from echokernels.runtime.config import ModelConfig

FUSED_TOKENS = 64
"""Most tokens of a step whose projections are fused with what follows them."""


class Placement(NamedTuple):
    """Where parameters live, and as what."""

    dtype: torch.dtype
    device: torch.device


class KVCache(NamedTuple):
    """The pages of one layer. Pages of codes have scales, pages of values have none.

    k, v: [num_pages, page_size, num_kv_heads, head_dim]. k_scale, v_scale: f32[num_pages,
    page_size, num_kv_heads]. A page is the same index in all four.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


def _parameter(place: Placement, *shape: int) -> nn.Parameter:
    """Uninitialised memory: every parameter is loaded before it is used."""
    return nn.Parameter(torch.empty(shape, **place._asdict()), requires_grad=False)


def _weight(place: Placement, out_features: int, in_features: int) -> nn.Parameter:
    """[out_features, in_features]. In fp32 on a CPU a tall one is stored column by column.

    The product with one token is bound by reading the weight, and MKL reads short rows at half the
    speed of long columns: SmolLM2-135M makes 1.3 times the tokens per second on one thread of an
    AMD EPYC 9004. Products with 4 tokens and more lose up to a tenth.
    """
    if place.device.type == "cpu" and place.dtype == torch.float32 and out_features > in_features:
        columns = torch.empty(in_features, out_features, **place._asdict())
        return nn.Parameter(columns.t(), requires_grad=False)
    return _parameter(place, out_features, in_features)


class Linear(nn.Module):
    """x weight^T + bias; weight: [out_features, in_features]."""

    def __init__(self, in_features: int, out_features: int, bias: bool, place: Placement) -> None:
        super().__init__()
        self.weight = _weight(place, out_features, in_features)
        self.bias = _parameter(place, out_features) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class PackedLinear(Linear):
    """Projections of one input as one product.

    `parts` names each, as checkpoints do, with its number of output features.
    """

    def __init__(
        self, in_features: int, parts: dict[str, int], bias: bool, place: Placement
    ) -> None:
        super().__init__(in_features, sum(parts.values()), bias, place)
        self.parts = parts

    def split(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """This layer's weight or bias as views, one for each part."""
        return dict(zip(self.parts, parameter.split(list(self.parts.values())), strict=True))


class QKVProjection(PackedLinear):
    """From the input of an attention layer to rotated queries, and keys and values in their pages.

    x: [tokens, hidden_size]. Returns the queries, [tokens, num_heads, head_dim]. `cos_sin_cache` is
    the model's `rotary_table`.
    """

    def __init__(self, config: ModelConfig, cos_sin_cache: torch.Tensor, place: Placement) -> None:
        q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        super().__init__(config.hidden_size, parts, config.attention_bias, place)
        self.heads: dict[str, Any] = {
            "num_heads": config.num_heads,
            "num_kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
        }
        self.cos_sin_cache = cos_sin_cache

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, positions: torch.Tensor, cache: KVCache, slot_mapping: torch.Tensor
    ) -> torch.Tensor:
        pages: dict[str, Any] = {
            "k_cache": cache.k,
            "v_cache": cache.v,
            "slot_mapping": slot_mapping,
            "k_scale": cache.k_scale,
            "v_scale": cache.v_scale,
        }
        if fuses_projections(x, self.weight):
            qkv = echokernels.fused_qkv_rope(
                x, self.weight, positions, self.cos_sin_cache, self.bias, **self.heads, **pages
            )
        else:
            qkv = super().forward(x)
            echokernels.fused_qk_norm_rope_cache(
                qkv, positions, self.cos_sin_cache, **self.heads, **pages
            )
        return qkv.unflatten(-1, (-1, self.heads["head_dim"]))[:, : self.heads["num_heads"]]


class GateUpProjection(PackedLinear):
    """silu(gate_proj(x)) * up_proj(x): [tokens, hidden_size] -> [tokens, intermediate_size]."""

    def __init__(self, config: ModelConfig, place: Placement) -> None:
        parts = dict.fromkeys(("gate_proj", "up_proj"), config.intermediate_size)
        super().__init__(config.hidden_size, parts, config.mlp_bias, place)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if fuses_projections(x, self.weight):
            return echokernels.fused_gate_up(x, self.weight, self.bias)
        return echokernels.silu_and_mul(super().forward(x))


def fuses_projections(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether x weight^T and what follows it are faster as one kernel.

    On a GPU, up to FUSED_TOKENS tokens, where reading the weights takes the time, and for weights
    with more than a quarter as many rows as columns: the table is in docs/log.md ("Projections with
    fused epilogues"). With more tokens the GEMM of PyTorch's library is faster; with few rows it
    is too, for it also divides the columns among the SMs. Exact fp32 products stay with it as well:
    ours do not use tensor cores.
    """
    rows, columns = weight.shape
    return (
        x.is_cuda and x.shape[0] <= FUSED_TOKENS and x.dtype != torch.float32 and 4 * rows > columns
    )


class Embedding(nn.Module):
    """Token ids i32 or i64 [tokens] -> [tokens, hidden_size]; with `is_head` the LM head too."""

    def __init__(self, vocab_size: int, hidden_size: int, is_head: bool, place: Placement) -> None:
        super().__init__()
        new = _weight if is_head else _parameter
        self.weight = new(place, vocab_size, hidden_size)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(input_ids, self.weight)


class RMSNorm(nn.Module):
    """The norm of x + residual, and that sum: (y, residual). Both inputs are overwritten.

    Without a residual, x becomes the residual and stays as it is.
    """

    def __init__(self, hidden_size: int, eps: float, place: Placement) -> None:
        super().__init__()
        self.weight = _parameter(place, hidden_size)
        self.eps = eps

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            return echokernels.rms_norm(x, self.weight, self.eps), x
        return echokernels.fused_add_rms_norm(x, residual, self.weight, self.eps)


def rotary_table(config: ModelConfig, place: Placement) -> torch.Tensor:
    """Cosines and sines of all positions, fp32; the layers of a model share one."""
    return echokernels.rope_table(
        config.head_dim,
        config.max_position_embeddings,
        config.rope_theta,
        config.rope_scaling,
        place.device,
    )


class Attention(nn.Module):
    """Lets every query see the pages of its sequence up to itself; its own key is in them.

    q: [tokens, num_heads, head_dim]; returns that shape. The sequences of one token come first in
    the batch: they are decodes, the others chunks.
    """

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.softmax_scale = head_dim**-0.5

    def forward(self, q: torch.Tensor, cache: KVCache, metadata: AttentionMetadata) -> torch.Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        scales: dict[str, Any] = {"k_scale": cache.k_scale, "v_scale": cache.v_scale}
        num_decodes = 0
        if (decodes := metadata.decodes) is not None:
            num_decodes = decodes.seqused_k.shape[0]
            echokernels.paged_attention(
                q[:num_decodes],
                cache.k,
                cache.v,
                decodes.block_table,
                decodes.seqused_k,
                softmax_scale=self.softmax_scale,
                out=out[:num_decodes],
                **scales,
            )
        if (chunks := metadata.chunks) is not None:
            echokernels.flash_attn_varlen(
                q[num_decodes:],
                cache.k,
                cache.v,
                chunks.cu_seqlens_q,
                max_seqlen_q=chunks.max_seqlen_q,
                max_seqlen_k=chunks.max_seqlen_k,
                seqused_k=chunks.seqused_k,
                block_table=chunks.block_table,
                causal=True,
                softmax_scale=self.softmax_scale,
                out=out[num_decodes:],
                **scales,
            )
        return out
