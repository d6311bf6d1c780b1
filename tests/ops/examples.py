"""A small call of every op, for the tests of what all ops promise."""

from typing import Any

import torch

import echokernels
from echokernels.moe.permute import moe_align_capacity
from tests.strategies import generator, randn


def examples(device: torch.device, tokens: int = 5) -> dict[str, tuple[Any, ...]]:
    """Arguments by the name of the op, the same numbers on every device.

    `tokens`, at least 3, is also the number of sequences and of rows. Inputs are slices of wider
    tensors: strides are not a fresh tensor's. A new op gets its line here.
    """
    gen = generator(0)

    def new(*shape: int) -> torch.Tensor:
        return randn(*shape, dtype=torch.float32, device=device, gen=gen)

    def index(*values: Any) -> torch.Tensor:
        return torch.tensor(values, device=device, dtype=torch.int32)

    def steps(first: int, step: int) -> torch.Tensor:
        return torch.arange(tokens, device=device, dtype=torch.int32) * step + first

    def choices() -> torch.Tensor:  # of eight experts, two for each token
        return torch.stack((steps(0, 1) % 8, steps(3, 1) % 8), dim=1)

    blocks = moe_align_capacity(2 * tokens, 7, 4) // 4
    x, weight = new(tokens, 80)[:, :64], new(64)
    qkv = new(tokens, 6, 32)
    q, k, v = qkv[:, :4], qkv[:, 4:5], qkv[:, 5:]
    k_cache, v_cache = new(8, 8, 1, 32), new(8, 1, 8, 32).transpose(1, 2)
    table = torch.stack((steps(0, 1) % 8, steps(3, 1) % 8), dim=1)
    biases = (new(4).abs(), new(4), None, None)  # ALiBi, sinks, scales
    lse = new(4, tokens)
    ones = torch.ones(tokens, device=device)
    gated = {
        name: (torch.zeros(tokens, 40, device=device), new(tokens, 96)[:, :80])
        for name in ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul")
    }
    return gated | {
        "rms_norm": (torch.zeros_like(x), x, weight, 1e-6, 1.0),
        "fused_add_rms_norm": (x.clone(), new(tokens, 80)[:, 16:], weight, 1e-6, 0.0),
        "fused_gate_up": (
            torch.zeros(tokens, 40, device=device), x, new(80, 96)[:, :64], new(80), "gelu_tanh",
        ),
        "fused_qk_norm_rope_cache": (
            new(tokens, 144)[:, :128], steps(0, 3) % 16,
            echokernels.rope_table(16, 8, device=device),
            new(32), new(32), 1e-6, 2, 1, 32, True, k_cache, v_cache, steps(-1, 2), None, None,
        ),
        "fused_qkv_rope": (
            torch.zeros(tokens, 128, device=device), x, new(128, 80)[:, :64], new(128),
            steps(0, 3) % 16, echokernels.rope_table(16, 8, device=device), new(32), None, 1e-6,
            2, 1, 32, True, k_cache, v_cache, steps(-1, 2), None, None,
        ),
        "rms_norm_quant": (
            torch.zeros(tokens, 64, dtype=torch.int8, device=device), new(tokens, 2)[:, 0], x,
            new(tokens, 80)[:, 16:], weight, 1e-6, 1.0,
        ),
        "silu_and_mul_quant": (
            torch.zeros(tokens, 40, dtype=torch.int8, device=device), new(tokens, 2)[:, 0],
            new(tokens, 96)[:, :80],
        ),
        "quantize_int8": (
            torch.zeros(tokens, 2, 32, dtype=torch.int8, device=device)[..., :24],
            new(2, tokens).T, new(tokens, 80).view(tokens, 2, 40)[..., 8:32],
        ),
        "dequantize_int8": (
            torch.zeros(tokens, 2, 24, device=device),
            index(*range(-40, 40)).char().repeat(tokens).view(tokens, 2, 40)[..., 8:32],
            new(2, tokens).T,
        ),
        "rotary_embedding": (
            steps(0, 3) % 16, q, k, 32, echokernels.rope_table(16, 8, device=device), True,
        ),
        "reshape_and_cache": (k, v, k_cache, v_cache, steps(-1, 2), None, None),
        "flash_attn_varlen": (
            torch.zeros_like(q), lse.clone(), q, k, v, index(0, 2, tokens), index(0, 2, tokens),
            None, None, tokens, tokens, 0.2, True, -1, -1, 0.0, *biases,
        ),
        "paged_attention": (
            torch.zeros_like(q), None, q, k_cache, v_cache, table, steps(9, 1) % 17, None,
            1, 0.2, True, -1, -1, 0.0, *biases, 2, 0, None,
        ),
        "merge_attn_states": (torch.zeros_like(q), lse.clone(), q, lse, q.flip(0), lse.flip(1)),
        "topk_softmax": (new(tokens, 4)[:, :2], choices(), new(tokens, 96)[:, :77], True),
        "grouped_topk": (
            new(tokens, 4)[:, :2], choices(), new(tokens, 96)[:, :76], new(76), 4, 2, True, True,
            2.5,
        ),
        "moe_align": (
            index(*range(4 * blocks)), index(*range(blocks)), index(0), choices(), 7, 4, 1,
        ),
        "moe_permute": (
            torch.zeros(2 * tokens, 64, device=device), index(*range(8)), choices(), x, choices(),
            7, 1,
        ),
        "grouped_gemm": (
            torch.zeros(tokens, 20, device=device), x, new(3, 40, 80)[..., :64],
            index(0, 1, 1, tokens), new(tokens), "silu",
        ),
        "fused_moe": (
            torch.zeros_like(x), x, new(7, 40, 80)[..., :64], new(7, 64, 32)[..., :20],
            new(tokens, 2).abs(), choices(), "silu", 1, None,
        ),
        "moe_unpermute": (
            torch.zeros_like(x), new(2 * tokens, 80)[:, :64], choices(), new(tokens, 2).abs(),
        ),
        "sample": (
            steps(0, 0), torch.zeros(tokens, device=device), new(tokens, 96)[:, :77], ones * 0.8,
            steps(0, 3), ones * 0.9, ones * 0.0, steps(1, 1).long(), steps(4, 1),
        ),
    }  # fmt: skip
