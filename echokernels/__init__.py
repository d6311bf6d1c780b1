"""EchoKernels: LLM inference kernels in pure Python. Importing registers `torch.ops.echo.*` and
does nothing else."""

from echokernels.attention.merge import merge_attn_states
from echokernels.attention.paged_decode import attention_workspace_size, paged_attention
from echokernels.attention.prefill import flash_attn_varlen
from echokernels.norm.rms_norm import fused_add_rms_norm, rms_norm

__version__ = "0.1.0"

__all__ = [
    "attention_workspace_size",
    "flash_attn_varlen",
    "fused_add_rms_norm",
    "merge_attn_states",
    "paged_attention",
    "rms_norm",
]
