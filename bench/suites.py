"""The shapes that the ops are measured at.

FULL is an 8B Llama: 32 query heads, 8 KV heads, head dim 128, MLP 14,336, vocabulary 128,256.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from bench.inputs import ragged_lengths


@dataclass(frozen=True)
class Suite:
    """Shapes of all cases, and which peers to measure."""

    tokens: tuple[int, ...]
    hidden: tuple[int, ...]
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    prefill: tuple[tuple[int, int, int], ...]  # (sequences, length, head_dim)
    decode: Mapping[str, list[int]]  # context lengths
    merged_tokens: tuple[int, ...]
    sampled_rows: tuple[int, ...]
    vocab: int
    top_k: int
    sdpa: tuple[str, ...] = ("cudnn", "flash")
    compile_modes: tuple[str, ...] = ("default",)


FULL = Suite(
    tokens=(1, 32, 1024, 16_384),
    hidden=(4096, 8192),
    intermediate=14_336,
    heads=32,
    kv_heads=8,
    head_dim=128,
    prefill=((16, 1024, 128), (4, 4096, 128), (1, 16_384, 128), (4, 4096, 64)),
    decode={
        "1x1k": [1024],
        "1x8k": [8192],
        "1x32k": [32_768],
        "1x128k": [131_072],
        "8x8k": [8192] * 8,
        "64x2k": [2048] * 64,
        "64x8k": [8192] * 64,
        "256x1k": [1024] * 256,
        "ragged64": ragged_lengths(64, 128, 16_384),
    },
    merged_tokens=(1024, 16_384),
    sampled_rows=(1, 64, 256),
    vocab=128_256,
    top_k=50,
)
QUICK = Suite(
    tokens=(1, 5),
    hidden=(64,),
    intermediate=48,
    heads=4,
    kv_heads=2,
    head_dim=32,
    prefill=((2, 24, 32),),
    decode={"2x40": [40] * 2, "ragged3": [1, 16, 33]},
    merged_tokens=(5,),
    sampled_rows=(3,),
    vocab=97,
    top_k=5,
    sdpa=("math",),
    compile_modes=(),
)
