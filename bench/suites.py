"""The shapes that the ops are measured at.

FULL is an 8B Llama: 32 query heads, 8 KV heads, head dim 128, MLP 14,336, vocabulary 128,256.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.inputs import ragged_lengths


@dataclass(frozen=True)
class Layer:
    """The projections of a model's layer, or of its share of a tensor-parallel GPU."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    qk_norm: bool = False


@dataclass(frozen=True)
class Experts:
    """A layer of experts, with how many tokens at a time."""

    hidden: int
    width: int
    count: int
    chosen: int  # by each token
    tokens: Sequence[int]
    skewed_tokens: Sequence[int] = ()  # of which half have the first two experts among theirs


@dataclass(frozen=True)
class Prefill:
    """Queries and keys of each sequence; the last query stands at the last key."""

    name: str
    q_lens: Sequence[int]
    k_lens: Sequence[int]
    head_dim: int = 128
    causal: bool = True
    window_left: int = -1  # keys seen before a query's own; all
    paged: bool = False


def _square(
    num_seqs: int, length: int, head_dim: int = 128, prefix: str = "", **options: Any
) -> Prefill:
    lens = [length] * num_seqs
    return Prefill(f"{prefix}{num_seqs}x{length}", lens, lens, head_dim, **options)


@dataclass(frozen=True)
class Decode:
    """The last `queries` tokens of each context, whose keys are on pages in random order."""

    name: str
    lens: Sequence[int]
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    queries: int = 1
    window_left: int = -1  # keys seen before a query's own; all

    @property
    def full_name(self) -> str:
        plain = Decode("", ())
        parts = [f"{self.name}_h{self.heads}/{self.kv_heads}"]
        letters = {"head_dim": "d", "page_size": "p", "queries": "q", "window_left": "w"}
        for name, letter in letters.items():
            if (value := getattr(self, name)) != getattr(plain, name):
                parts.append(f"{letter}{value}")
        return "_".join(parts)


_CONTEXTS = {
    "1x1k": [1024],
    "1x8k": [8192],
    "1x32k": [32_768],
    "1x128k": [131_072],
    "8x8k": [8192] * 8,
    "64x2k": [2048] * 64,
    "64x4k": [4096] * 64,
    "64x8k": [8192] * 64,
    "64x32k": [32_768] * 64,
    "256x1k": [1024] * 256,
    "ragged64": ragged_lengths(64, 128, 16_384),
}


def _decode(name: str, **options: Any) -> Decode:
    return Decode(name, _CONTEXTS[name], **options)


@dataclass(frozen=True)
class Suite:
    """Shapes of all cases, and which peers to measure."""

    tokens: tuple[int, ...]
    hidden: tuple[int, ...]
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    prefill: tuple[Prefill, ...]
    decode: tuple[Decode, ...]
    decode_int8: tuple[Decode, ...]
    merged_tokens: tuple[int, ...]
    sampled_rows: tuple[int, ...]  # of fp32 logits over `vocab`
    sampled_wide: tuple[tuple[int, int], ...]  # (rows, vocabulary), of fp32 and of bf16 logits
    vocab: int
    top_k: int
    layers: Mapping[str, Layer]
    few_tokens: tuple[int, ...]
    routed_tokens: tuple[int, ...]
    experts: int
    chosen: int  # of them by each token
    expert_hidden: int
    expert_layers: Mapping[str, Experts]
    sdpa: tuple[str, ...] = ("cudnn", "flash")
    compile_modes: tuple[str, ...] = ("default",)


RAGGED = ragged_lengths(64, 64, 8192)

FULL = Suite(
    tokens=(1, 32, 1024, 16_384),
    hidden=(4096, 8192),
    intermediate=14_336,
    heads=32,
    kv_heads=8,
    head_dim=128,
    prefill=(
        _square(16, 1024),
        _square(4, 4096),
        _square(1, 16_384),
        _square(4, 4096, 64),
        _square(1, 16_384, 64),
        _square(4, 4096, 256),
        _square(4, 4096, prefix="full_", causal=False),
        Prefill("ragged64", RAGGED, RAGGED),
        _square(1, 32_768),
        _square(1, 32_768, prefix="window1024_", window_left=1023),
        Prefill("suffix8192of16384", [8192], [16_384]),
        Prefill("paged_suffix8192of16384", [8192], [16_384], paged=True),
        _square(16, 1024, prefix="paged_", paged=True),
        _square(4, 4096, prefix="paged_", paged=True),
        _square(1, 16_384, prefix="paged_", paged=True),
        _square(4, 4096, 64, prefix="paged_", paged=True),
    ),
    decode=(
        *(
            _decode(name)
            for name in ["1x1k", "1x8k", "1x32k", "1x128k", "8x8k", "64x2k", "64x8k", "256x1k"]
        ),
        _decode("ragged64"),
        *(_decode(name, heads=64) for name in ("1x8k", "64x8k", "ragged64")),
        *(_decode(name, heads=8, kv_heads=1) for name in ("1x32k", "64x8k")),
        *(_decode(name, head_dim=64) for name in ("64x8k", "1x32k")),
        *(_decode("64x8k", page_size=page_size) for page_size in (1, 64, 256)),
        _decode("64x4k", queries=4),
        _decode("64x32k", window_left=4095),
    ),
    decode_int8=(
        *(
            _decode(name)
            for name in ["1x1k", "1x8k", "1x32k", "1x128k", "8x8k", "64x2k", "64x8k", "256x1k"]
        ),
        _decode("ragged64"),
        _decode("64x8k", heads=64),
        _decode("64x8k", heads=8, kv_heads=1),
        _decode("64x8k", head_dim=64),
    ),
    merged_tokens=(1024, 16_384),
    sampled_rows=(1, 64, 256),
    sampled_wide=((64, 151_936),),
    vocab=128_256,
    top_k=50,
    layers={
        "llama3-8b": Layer(4096, 14_336, 32, 8),
        "qwen3-0.6b": Layer(1024, 3072, 16, 8, qk_norm=True),
        "qwen3-8b": Layer(4096, 12_288, 32, 8, qk_norm=True),
        "llama3-70b-tp8": Layer(8192, 3584, 8, 1),
    },
    few_tokens=(1, 8, 16, 32, 64),
    routed_tokens=(1, 64, 4096),
    experts=128,
    chosen=8,
    expert_hidden=2048,
    expert_layers={
        "qwen3-30b-a3b": Experts(2048, 768, 128, 8, (1, 64, 4096, 16_384), (4096,)),
        "mixtral-8x7b": Experts(4096, 14_336, 8, 2, (1, 64, 4096, 16_384), (4096,)),
    },
)
QUICK = Suite(
    tokens=(1, 5),
    hidden=(64,),
    intermediate=48,
    heads=4,
    kv_heads=2,
    head_dim=32,
    prefill=(
        _square(2, 24, 32),
        _square(2, 24, 32, prefix="full_", causal=False),
        Prefill("ragged3", [1, 16, 33], [1, 20, 40], 32),
        _square(2, 24, 32, prefix="window4_", window_left=3),
        _square(2, 24, 32, prefix="paged_", paged=True),
    ),
    decode=(
        Decode("2x40", [40] * 2, 4, 2, 32),
        Decode("ragged3", [1, 16, 33], 4, 2, 32),
        Decode("ragged3", [4, 16, 33], 4, 2, 32, page_size=8, queries=4, window_left=9),
    ),
    decode_int8=(Decode("ragged3", [1, 16, 33], 4, 2, 32),),
    merged_tokens=(5,),
    sampled_rows=(3,),
    sampled_wide=((2, 101),),
    vocab=97,
    top_k=5,
    layers={"tiny": Layer(64, 48, 4, 2, head_dim=32, qk_norm=True)},
    few_tokens=(3,),
    routed_tokens=(1, 70),
    experts=8,
    chosen=2,
    expert_hidden=48,
    expert_layers={"tiny": Experts(48, 32, 4, 2, (1, 9), (9,))},
    sdpa=("math",),
    compile_modes=(),
)
