"""One call of each variant of the kernels for Hopper, under a memory checker:

    python -m tests.sanitize && compute-sanitizer --tool memcheck python -m tests.sanitize

The first run compiles, which under the checker would take long.
"""

from typing import Any

import torch

from echokernels import flash_attn_varlen, fused_moe, grouped_gemm, paged_attention
from echokernels._path import forced_path
from tests.strategies import boundaries

HEADS, KV_HEADS = 4, 2
CAUSAL = {"causal": True}
VARIANTS: dict[str, tuple[int, torch.dtype, int, int, dict[str, Any]]] = {
    # name: (head_dim, dtype, sequences, page_size, options)
    "causal": (128, torch.bfloat16, 3, 0, CAUSAL),
    "full": (128, torch.float16, 3, 0, {}),
    "list": (128, torch.bfloat16, 130, 0, CAUSAL),
    "window": (128, torch.bfloat16, 3, 0, {"causal": True, "window": (70, -1)}),
    "softcap": (128, torch.bfloat16, 3, 0, {"softcap": 20.0}),
    "biased": (128, torch.bfloat16, 3, 0, {"causal": True, "biased": True}),
    "pages": (128, torch.bfloat16, 3, 16, CAUSAL),
    "codes": (128, torch.bfloat16, 3, 16, {"causal": True, "codes": True}),
    "codes-d64": (64, torch.float16, 3, 64, {"codes": True}),
    "d64": (64, torch.bfloat16, 3, 0, CAUSAL),
    "d64-pages": (64, torch.float16, 3, 64, CAUSAL),
    "d96": (96, torch.bfloat16, 3, 0, CAUSAL),
    "d256": (256, torch.bfloat16, 3, 0, CAUSAL),
}

DECODES: dict[str, tuple[int, torch.dtype, int, int, dict[str, Any]]] = {
    "decode": (128, torch.bfloat16, 3, 16, {}),
    "decode-many": (128, torch.bfloat16, 200, 16, {}),  # two programs on an SM
    "decode-d64": (64, torch.float16, 3, 64, {"window": (70, -1), "softcap": 20.0}),
    "decode-biased": (96, torch.bfloat16, 3, 256, {"biased": True}),
    "decode-copies": (128, torch.bfloat16, 200, 1, {}),
    "decode-codes": (128, torch.bfloat16, 200, 16, {"codes": True}),
    "decode-codes-copies": (64, torch.float16, 3, 3, {"codes": True}),
}


LAYERS = {
    # name: (tokens, k, experts, hidden, width)
    "experts": (600, 2, 8, 256, 264),
    "experts-few-rows": (70, 4, 60, 136, 40),
    "experts-direct": (1, 8, 128, 2048, 768),
}


def inputs(
    head_dim: int, dtype: torch.dtype, num_seqs: int, page_size: int, options: dict[str, Any]
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    lens = [[70, 300, 129][i % 3] for i in range(num_seqs)]
    cu_seqlens = boundaries(lens, torch.int32, "cuda")

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda").to(dtype)

    options = {**options, "max_seqlen_q": max(lens), "return_lse": True}
    if options.pop("biased", False):
        options |= {"alibi_slopes": torch.rand(HEADS, device="cuda"), "sinks": randn(HEADS)}
    q = randn(sum(lens), HEADS, head_dim)
    if not page_size:
        k, v = (randn(sum(lens), KV_HEADS, head_dim) for _ in range(2))
        return [q, k, v, cu_seqlens, cu_seqlens], options
    pages = -(-max(lens) // page_size)
    options["block_table"] = torch.randperm(num_seqs * pages, device="cuda").view(-1, pages)
    options["seqused_k"] = cu_seqlens.diff()
    k, v = (randn(num_seqs * pages, page_size, KV_HEADS, head_dim) for _ in range(2))
    if options.pop("codes", False):
        k, v = (torch.randint_like(x, -127, 128, dtype=torch.int8) for x in (k, v))
        for name in ("k_scale", "v_scale"):
            options[name] = torch.rand(k.shape[:3], device="cuda") / 64
    return [q, k, v, cu_seqlens], options


def layer(
    tokens: int, k: int, experts: int, hidden: int, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    def randn(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, device="cuda") * shape[-1] ** -0.5).bfloat16()

    weights, ids = torch.rand(tokens, experts, device="cuda").topk(k)
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    return x, randn(experts, 2 * width, hidden), randn(experts, hidden, width), weights, ids


def check_experts() -> None:
    for name, shape in LAYERS.items():
        x, w1, w2, weights, ids = layer(*shape)
        rows = torch.arange(len(w1) + 1, device="cuda") * len(x) // (len(w1) + 1) + 1
        of_rows = torch.rand(len(x), device="cuda")
        results = []
        for path in ("hopper", "portable"):
            with torch.inference_mode(), forced_path(path):
                out = torch.zeros(len(x), w1.shape[1], dtype=x.dtype, device="cuda")
                grouped_gemm(x, w1, rows.int(), row_weights=of_rows, out=out)
                results.append((fused_moe(x, w1, w2, weights, ids), out))
        for actual, expected in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=5e-2)
        print(name, "ok", flush=True)


def main() -> None:
    torch.manual_seed(0)
    check_experts()
    check_prefill()
    check_decode()


def check_prefill() -> None:
    for name, variant in VARIANTS.items():
        args, options = inputs(*variant)
        with torch.inference_mode(), forced_path("hopper"):
            out, lse = flash_attn_varlen(*args, **options)
        with torch.inference_mode(), forced_path("portable"):
            want, want_lse = flash_attn_varlen(*args, **options)
        torch.testing.assert_close(out, want, rtol=0, atol=3e-2)
        torch.testing.assert_close(lse, want_lse, rtol=0, atol=1e-3)
        print(name, "ok", flush=True)


def check_decode() -> None:
    for name, (head_dim, dtype, num_seqs, page_size, given) in DECODES.items():
        (_, k, v, _), options = inputs(head_dim, dtype, num_seqs, page_size, given)
        del options["max_seqlen_q"]
        q = torch.randn(num_seqs, HEADS, head_dim, device="cuda").to(dtype)
        results = []
        for path in ("hopper", "portable"):
            with torch.inference_mode(), forced_path(path):
                results.append(paged_attention(q, k, v, **options))
        for actual, expected in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=3e-2)
        print(name, "ok", flush=True)


if __name__ == "__main__":
    main()
