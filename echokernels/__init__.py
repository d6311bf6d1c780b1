"""EchoKernels: LLM inference kernels in pure Python.

Importing registers `torch.ops.echo.*` and does nothing else.
"""

from echokernels.activation.gated import gelu_and_mul, gelu_tanh_and_mul, silu_and_mul
from echokernels.attention.kv_cache import reshape_and_cache
from echokernels.attention.merge import merge_attn_states
from echokernels.attention.paged_decode import paged_attention
from echokernels.attention.prefill import flash_attn_varlen
from echokernels.attention.rope import rotary_embedding
from echokernels.attention.rope_table import rope_table
from echokernels.attention.workspace import attention_workspace_size
from echokernels.norm.rms_norm import fused_add_rms_norm, rms_norm
from echokernels.sampling.sample import sample

__version__ = "0.1.0"

__all__ = [
    "attention_workspace_size",
    "flash_attn_varlen",
    "fused_add_rms_norm",
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "merge_attn_states",
    "paged_attention",
    "reshape_and_cache",
    "rms_norm",
    "rope_table",
    "rotary_embedding",
    "sample",
    "silu_and_mul",
]
