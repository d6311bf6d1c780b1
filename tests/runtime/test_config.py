import math

import pytest

from echokernels.runtime.config import EngineConfig, ModelConfig

TINY = {
    "vocab_size": 32,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_layers": 2,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
}

# The form of transformers 4, with the nulls that real files have.
LLAMA_HF = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008],
    "head_dim": None,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 128256,
}


def test_model_defaults():
    config = ModelConfig(**TINY)
    assert config.architecture == "llama"
    assert config.rope_scaling is None
    assert config.eos_token_ids == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_kv_heads", 4),  # 6 is no multiple of it
        ("num_kv_heads", 0),
        ("vocab_size", 0),
        ("head_dim", 5),
        ("rope_theta", 0.0),
        ("rope_theta", math.inf),
        ("rms_norm_eps", math.nan),
        ("rope_scaling", {"factor": 2.0}),
        ("eos_token_ids", (-1,)),
        ("bos_token_id", -1),
        ("torch_dtype", "int8"),
        ("architecture", ""),
    ],
)
def test_bad_model_values_are_named(field, value):
    with pytest.raises(ValueError, match=field):
        ModelConfig(**(TINY | {field: value}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", 24.0),
        ("num_layers", True),
        ("rms_norm_eps", "1e-6"),
        ("tie_word_embeddings", None),
        ("rope_scaling", "linear"),
        ("eos_token_ids", 2),
        ("architecture", None),
        ("no_such_field", 1),
    ],
)
def test_wrong_model_types_are_named(field, value):
    with pytest.raises(TypeError, match=field):
        ModelConfig(**(TINY | {field: value}))


def test_from_hf_llama():
    config = ModelConfig.from_hf(LLAMA_HF)
    assert config == ModelConfig(
        architecture="llama",
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=LLAMA_HF["rope_scaling"],
        max_position_embeddings=131072,
        tie_word_embeddings=True,
        bos_token_id=128000,
        eos_token_ids=(128001, 128008),
        torch_dtype="bfloat16",
    )


def test_from_hf_of_transformers_5_equals_that_of_4():
    v5 = {k: v for k, v in LLAMA_HF.items() if k not in ("rope_theta", "rope_scaling")}
    v5["rope_parameters"] = LLAMA_HF["rope_scaling"] | {"rope_theta": 500000.0}
    v5["dtype"] = v5.pop("torch_dtype")
    assert ModelConfig.from_hf(v5) == ModelConfig.from_hf(LLAMA_HF)


def test_from_hf_does_not_change_its_argument():
    rope_parameters = {"rope_theta": 1e6, "type": "linear", "factor": 2.0}
    config = ModelConfig.from_hf(LLAMA_HF | {"rope_parameters": rope_parameters})
    assert config.rope_theta == 1e6
    assert config.rope_scaling == {"rope_type": "linear", "factor": 2.0}
    assert rope_parameters == {"rope_theta": 1e6, "type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    "rope", [{}, {"rope_scaling": None}, {"rope_parameters": {"rope_type": "default"}}]
)
def test_from_hf_plain_rope(rope):
    hf = {k: v for k, v in LLAMA_HF.items() if not k.startswith("rope")}
    config = ModelConfig.from_hf(hf | rope)
    assert (config.rope_theta, config.rope_scaling) == (10_000.0, None)


def test_from_hf_defaults_and_single_eos():
    optional = ("num_key_value_heads", "tie_word_embeddings", "torch_dtype", "bos_token_id")
    hf = {k: v for k, v in LLAMA_HF.items() if k not in optional} | {"eos_token_id": 2}
    config = ModelConfig.from_hf(hf)
    assert config.num_kv_heads == 32
    assert config.tie_word_embeddings is False
    assert config.torch_dtype == "float32"
    assert config.bos_token_id is None
    assert config.eos_token_ids == (2,)
    assert ModelConfig.from_hf(hf | {"eos_token_id": None}).eos_token_ids == ()


@pytest.mark.parametrize("field", ["model_type", "vocab_size", "max_position_embeddings"])
def test_from_hf_names_a_missing_field(field):
    hf = {k: v for k, v in LLAMA_HF.items() if k != field}
    with pytest.raises(ValueError, match=f"{field} is missing"):
        ModelConfig.from_hf(hf)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "gelu"),
        ("sliding_window", 4096),
        ("quantization_config", {"quant_method": "fp8"}),
        ("hidden_size", 2049),  # no multiple of the heads, and no head_dim given
    ],
)
def test_from_hf_refuses_what_it_would_have_to_ignore(field, value):
    with pytest.raises(ValueError, match=field):
        ModelConfig.from_hf(LLAMA_HF | {field: value})


def test_from_hf_accepts_a_window_that_is_off():
    hf = LLAMA_HF | {"sliding_window": 4096, "use_sliding_window": False}
    assert ModelConfig.from_hf(hf) == ModelConfig.from_hf(LLAMA_HF)


@pytest.mark.parametrize(
    ("field", "value"), [("rope_scaling", "linear"), ("hidden_size", "2048"), ("head_dim", 64.0)]
)
def test_from_hf_names_wrong_types(field, value):
    with pytest.raises(TypeError, match=field):
        ModelConfig.from_hf(LLAMA_HF | {field: value})


def test_engine_defaults():
    config = EngineConfig()
    assert (config.page_size, config.max_num_seqs, config.max_num_batched_tokens) == (16, 256, 2048)
    assert config.kv_cache_dtype == "auto"
    assert config.max_model_len is config.num_pages is config.max_prefill_chunk is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_model_len", 0),
        ("page_size", 0),
        ("num_pages", -1),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 0),
        ("max_prefill_chunk", 0),
        ("kv_cache_dtype", "int4"),
        ("kv_cache_dtype", None),
        ("watermark", 1.01),
        ("watermark", -0.01),
        ("watermark", math.nan),
        ("seed", 2**64),
    ],
)
def test_bad_engine_values_are_named(field, value):
    with pytest.raises(ValueError, match=rf"{field} is {value!r}, must be"):
        EngineConfig(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_model_len", 16.0),
        ("page_size", True),
        ("page_size", None),
        ("num_pages", "8"),
        ("watermark", False),
        ("seed", None),
        ("no_such_field", 1),
    ],
)
def test_wrong_engine_types_are_named(field, value):
    with pytest.raises(TypeError, match=field):
        EngineConfig(**{field: value})
