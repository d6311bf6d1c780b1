"""Which projections the runtime fuses with what follows them."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from echokernels.runtime.layers import FUSED_TOKENS, fuses_projections


@pytest.mark.parametrize(
    ("tokens", "rows", "columns", "dtype", "device", "fused"),
    [
        (1, 6144, 4096, torch.bfloat16, "cuda", True),  # QKV of Llama-3-8B
        (FUSED_TOKENS, 28_672, 4096, torch.float16, "cuda", True),  # its gate and up
        (FUSED_TOKENS + 1, 6144, 4096, torch.bfloat16, "cuda", False),
        (1, 1280, 8192, torch.bfloat16, "cuda", False),  # QKV of Llama-3-70B on one of 8 GPUs
        (1, 2049, 8192, torch.bfloat16, "cuda", True),
        (1, 2048, 8192, torch.bfloat16, "cuda", False),
        (1, 6144, 4096, torch.float32, "cuda", False),
        (1, 6144, 4096, torch.bfloat16, "cpu", False),
    ],
)
def test_the_rule(tokens, rows, columns, dtype, device, fused):
    with FakeTensorMode():
        x = torch.empty(tokens, columns, dtype=dtype, device=device)
        weight = torch.empty(rows, columns, dtype=dtype, device=device)
    assert fuses_projections(x, weight) is fused
