"""EchoKernels: LLM inference kernels in pure Python.

Importing registers `torch.ops.echo.*` and does nothing else.
"""

from echokernels._no_jit import no_jit
from echokernels._warmup import WarmupStep, warmup
from echokernels.activation.gate_up import fused_gate_up
from echokernels.activation.gated import gelu_and_mul, gelu_tanh_and_mul, silu_and_mul
from echokernels.activation.gated_quant import silu_and_mul_quant
from echokernels.attention.kv_cache import reshape_and_cache
from echokernels.attention.merge import merge_attn_states
from echokernels.attention.paged_decode import paged_attention
from echokernels.attention.prefill import flash_attn_varlen
from echokernels.attention.qk_norm_rope_cache import fused_qk_norm_rope_cache
from echokernels.attention.qkv_rope import fused_qkv_rope
from echokernels.attention.rope import rotary_embedding
from echokernels.attention.rope_table import rope_table
from echokernels.attention.split_plan import split_plan
from echokernels.attention.workspace import attention_workspace_size
from echokernels.moe.fused_moe import fused_moe, fused_moe_workspace_size
from echokernels.moe.grouped_gemm import grouped_gemm
from echokernels.moe.permute import (
    moe_align,
    moe_align_capacity,
    moe_permute,
    moe_unpermute,
)
from echokernels.moe.routing import grouped_topk, topk_softmax
from echokernels.norm.rms_norm import fused_add_rms_norm, rms_norm
from echokernels.norm.rms_norm_quant import rms_norm_quant
from echokernels.quant.int8_kv import dequantize_int8, quantize_int8
from echokernels.sampling.sample import sample

__version__ = "0.1.0"

__all__ = [
    "WarmupStep",
    "attention_workspace_size",
    "dequantize_int8",
    "flash_attn_varlen",
    "fused_add_rms_norm",
    "fused_gate_up",
    "fused_moe",
    "fused_moe_workspace_size",
    "fused_qk_norm_rope_cache",
    "fused_qkv_rope",
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "grouped_gemm",
    "grouped_topk",
    "merge_attn_states",
    "moe_align",
    "moe_align_capacity",
    "moe_permute",
    "moe_unpermute",
    "no_jit",
    "paged_attention",
    "quantize_int8",
    "reshape_and_cache",
    "rms_norm",
    "rms_norm_quant",
    "rope_table",
    "rotary_embedding",
    "sample",
    "silu_and_mul",
    "silu_and_mul_quant",
    "split_plan",
    "topk_softmax",
    "warmup",
]
