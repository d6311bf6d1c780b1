"""What a model is (`ModelConfig`) and how the engine is to run it (`EngineConfig`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from echokernels.runtime._validation import (
    check_bool,
    check_int,
    check_number,
    check_str,
    check_token_ids,
)

TORCH_DTYPES = ("float32", "float16", "bfloat16")
KV_CACHE_DTYPES = ("auto", "int8", "fp8")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape and constants of a decoder. Raises TypeError or ValueError, naming the field."""

    architecture: str = "llama"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    """Hugging Face's fields, `rope_type` among them; None for plain rotary embedding."""
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    torch_dtype: str = "float32"
    """Type of the weights as stored."""

    def __post_init__(self) -> None:
        check_str("architecture", self.architecture)
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            check_int(name, getattr(self, name), low=1)
        for name in ("rms_norm_eps", "rope_theta"):
            check_number(name, getattr(self, name), low=0)
        for name in ("tie_word_embeddings", "attention_bias", "mlp_bias"):
            check_bool(name, getattr(self, name))
        if self.bos_token_id is not None:
            check_int("bos_token_id", self.bos_token_id, low=0)
        check_token_ids("eos_token_ids", self.eos_token_ids)
        self._check_relations()

    def _check_relations(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads is {self.num_heads}, must be a multiple of {self.num_kv_heads=}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}, must be even: RoPE rotates pairs")
        if self.rope_theta == 0:
            raise ValueError(f"rope_theta is {self.rope_theta}, must be above 0")
        if self.rope_scaling is not None:
            if not isinstance(self.rope_scaling, dict):
                raise TypeError(f"rope_scaling is {self.rope_scaling!r}, must be a dict or None")
            if "rope_type" not in self.rope_scaling:
                raise ValueError(f"rope_scaling is {self.rope_scaling}, must have a rope_type")
        if self.torch_dtype not in TORCH_DTYPES:
            raise ValueError(
                f"torch_dtype is {self.torch_dtype!r}, must be one of {', '.join(TORCH_DTYPES)}"
            )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """From the content of a Hugging Face `config.json`, of transformers 4 or 5.

        Raises ValueError if a field is missing, or asks for something that no model here computes.
        """
        _refuse_unsupported(config)
        rope_theta, rope_scaling = _rope(config)
        num_heads = _required(config, "num_attention_heads")
        hidden_size = _required(config, "hidden_size")
        return cls(
            architecture=_required(config, "model_type"),
            vocab_size=_required(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_required(config, "intermediate_size"),
            num_layers=_required(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=_get(config, "num_key_value_heads", num_heads),
            head_dim=_head_dim(config, hidden_size, num_heads),
            rms_norm_eps=_get(config, "rms_norm_eps", 1e-6),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            max_position_embeddings=_required(config, "max_position_embeddings"),
            tie_word_embeddings=_get(config, "tie_word_embeddings", False),
            attention_bias=_get(config, "attention_bias", False),
            mlp_bias=_get(config, "mlp_bias", False),
            bos_token_id=config.get("bos_token_id"),
            eos_token_ids=_eos_token_ids(config),
            torch_dtype=_torch_dtype(config),
        )


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Limits and sizes of an engine. Raises TypeError or ValueError, naming the field."""

    max_model_len: int | None = None
    """Most tokens of a request, prompt and output; None: as many as the model has positions."""
    page_size: int = 16
    """Tokens per page of the KV cache."""
    num_pages: int | None = None
    """Pages of the KV cache; None: as many as memory allows."""
    kv_cache_dtype: str = "auto"
    """What the KV cache holds. "auto": values of the model's dtype. "int8", or "fp8", which is
    float8_e4m3fn: codes, with one fp32 scale for each token and KV head of K and of V."""
    max_num_seqs: int = 256
    """Most sequences that run at once; `max_num_batched_tokens` is a limit too."""
    max_num_batched_tokens: int = 2048
    """Token budget of a step."""
    max_prefill_chunk: int | None = None
    """Most tokens that one sequence computes in a step; None: no limit but the budget."""
    watermark: float = 0.01
    """Share of the pages, rounded up, that an admission leaves free while something else runs."""
    seed: int = 0
    """For requests without a seed of their own."""

    def __post_init__(self) -> None:
        for name in ("page_size", "max_num_seqs", "max_num_batched_tokens"):
            check_int(name, getattr(self, name), low=1)
        for name in ("max_model_len", "num_pages", "max_prefill_chunk"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), low=1)
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ValueError(
                f"kv_cache_dtype is {self.kv_cache_dtype!r}, "
                f"must be one of {', '.join(KV_CACHE_DTYPES)}"
            )
        check_number("watermark", self.watermark, low=0, high=1)
        check_int("seed", self.seed, low=-(2**63), high=2**64 - 1)


def _required(config: Mapping[str, Any], name: str) -> Any:
    if config.get(name) is None:
        raise ValueError(f"{name} is missing from the model's config, must be given")
    return config[name]


def _get(config: Mapping[str, Any], name: str, default: Any) -> Any:
    """`config[name]`; files also write null for "the default"."""
    value = config.get(name)
    return default if value is None else value


def _head_dim(config: Mapping[str, Any], hidden_size: int, num_heads: int) -> int:
    if config.get("head_dim") is not None:
        return config["head_dim"]
    check_int("hidden_size", hidden_size, low=1)
    check_int("num_attention_heads", num_heads, low=1)
    if hidden_size % num_heads:
        raise ValueError(
            f"hidden_size is {hidden_size}, must be a multiple of num_attention_heads={num_heads} "
            "where head_dim is not given"
        )
    return hidden_size // num_heads


def _rope(config: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling. transformers 5 writes both into `rope_parameters`, 4 into two fields."""
    name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    scaling = _get(config, name, {})
    if not isinstance(scaling, dict):
        raise TypeError(f"{name} is {scaling!r}, must be an object or null")
    scaling = dict(scaling)
    theta = scaling.pop("rope_theta", None)
    if theta is None:
        theta = _get(config, "rope_theta", 10_000.0)
    if "type" in scaling:  # the older name
        scaling.setdefault("rope_type", scaling.pop("type"))
    is_plain = not scaling or scaling.get("rope_type") == "default"
    return theta, None if is_plain else scaling


def _eos_token_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    eos = _get(config, "eos_token_id", ())
    return tuple(eos) if isinstance(eos, list | tuple) else (eos,)


def _torch_dtype(config: Mapping[str, Any]) -> str:
    name = _get(config, "dtype", None) or _get(config, "torch_dtype", "float32")
    return str(name).removeprefix("torch.")


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    """What would change the result and has no field in ModelConfig must not be ignored."""
    hidden_act = _get(config, "hidden_act", "silu")
    if hidden_act != "silu":
        raise ValueError(f"hidden_act is {hidden_act!r}, must be 'silu'")
    if config.get("quantization_config") is not None:
        raise ValueError(
            f"quantization_config is {config['quantization_config']!r}, must be null: "
            "quantised weights are not supported"
        )
    window = _get(config, "sliding_window", None)
    if window is not None and _get(config, "use_sliding_window", True):
        raise ValueError(f"sliding_window is {window!r}, must be null: no model here has windows")
