"""Weights find their parameters by name, and nothing is left out or left over."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from echokernels.runtime.config import ModelConfig
from echokernels.runtime.layers import Placement
from echokernels.runtime.loader import checkpoint_views, fill_random, load_model, load_weights
from echokernels.runtime.models.registry import build_model
from tests.tiny_llama import TINY, save, tiny_llama

CPU_FP32 = Placement(torch.float32, torch.device("cpu"))


def build(**changes: object) -> torch.nn.Module:
    config = ModelConfig.from_hf({"model_type": "llama"} | TINY | changes)
    return build_model(config, CPU_FP32)


def tensors(**changes: object) -> dict[str, torch.Tensor]:
    """transformers' parameters. A tied head is listed once."""
    return dict(tiny_llama(**changes).named_parameters())


def test_every_tensor_is_where_its_name_says() -> None:
    model, weights = build(attention_bias=True), tensors(attention_bias=True)
    load_weights(model, weights.items())
    views = checkpoint_views(model)
    assert views.keys() == weights.keys()
    assert all(torch.equal(views[name], weight) for name, weight in weights.items())
    packed = dict(model.named_parameters())["model.layers.1.self_attn.qkv_proj.weight"]
    parts = [weights[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(packed, torch.cat(parts))


def test_a_tied_model_has_no_head_of_its_own() -> None:
    model, weights = build(tie_word_embeddings=True), tensors(tie_word_embeddings=True)
    load_weights(model, weights.items())
    hidden = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    expected = hidden @ weights["model.embed_tokens.weight"].T
    torch.testing.assert_close(model.compute_logits(hidden), expected)


def test_weights_are_converted() -> None:
    model, weights = build(), tensors()
    load_weights(model, ((name, weight.bfloat16()) for name, weight in weights.items()))
    assert torch.equal(model.model.norm.weight, weights["model.norm.weight"].bfloat16().float())


def test_tall_fp32_weights_lie_column_by_column_on_a_cpu() -> None:
    """The layout that makes single tokens fast; nothing but the strides may show it."""
    attention = build().model.layers[0].self_attn
    rows, columns = attention.qkv_proj.weight.shape
    assert (rows, columns) == (128, 64)
    assert attention.qkv_proj.weight.stride() == (1, rows)
    assert attention.o_proj.weight.stride() == (64, 1)
    config = ModelConfig.from_hf({"model_type": "llama"} | TINY)
    half = build_model(config, Placement(torch.bfloat16, torch.device("cpu")))
    assert half.model.layers[0].self_attn.qkv_proj.weight.stride() == (columns, 1)


def test_what_follows_from_the_configuration_is_passed_over() -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    load_weights(build(), [*tensors().items(), (name, torch.ones(8))])


def test_missing_and_unexpected_tensors_are_named() -> None:
    weights = tensors()
    name = "model.layers.1.self_attn.k_proj.weight"
    part = weights.pop(name)
    with pytest.raises(ValueError, match=f"1 tensors are missing: {name}; the model has 21"):
        load_weights(build(), weights.items())
    weights |= {name: part, "model.layers.2.mlp.up_proj.weight": part}
    with pytest.raises(
        ValueError, match=r"1 tensors are unexpected: model\.layers\.2\.mlp\.up_proj"
    ):
        load_weights(build(), weights.items())
    biased = tensors(mlp_bias=True)
    with pytest.raises(ValueError, match=r"6 tensors are unexpected: .*bias, \.\.\.;"):
        load_weights(build(), biased.items())


def test_another_shape_is_refused() -> None:
    weights = tensors()
    name = "model.layers.0.mlp.gate_proj.weight"
    weights[name] = weights[name][:-1]
    message = rf"tensor '{name}' has shape \(95, 64\), must have \(96, 64\)"
    with pytest.raises(ValueError, match=message):
        load_weights(build(), weights.items())


def test_the_error_names_the_file(tmp_path: Path) -> None:
    model = tiny_llama()
    model.model.layers = model.model.layers[:1]  # the configuration still says 2
    save(model, tmp_path, tokenizer=False)
    with pytest.raises(ValueError, match=rf"{tmp_path}: 9 tensors are missing: model.layers.1"):
        load_model(tmp_path, device="cpu")


def test_an_unknown_architecture_is_named() -> None:
    with pytest.raises(ValueError, match="architecture is 'mamba', must be one of llama"):
        build(model_type="mamba")


def test_random_weights_are_seeded_and_differ_from_each_other() -> None:
    first, second, other = build(), build(), build()
    for model, seed in ((first, 1), (second, 1), (other, 2)):
        fill_random(model, seed)
    views = [checkpoint_views(model) for model in (first, second, other)]
    for name, view in views[0].items():
        assert torch.equal(view, views[1][name])
        if "norm" in name:
            assert torch.equal(view, torch.ones_like(view))
        else:
            assert not torch.equal(view, views[2][name])
            assert view.std().item() == pytest.approx(0.02, rel=0.1)
    layers = [views[0][f"model.layers.{i}.mlp.up_proj.weight"] for i in range(2)]
    assert not torch.equal(*layers)
