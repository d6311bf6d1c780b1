"""`bench.divergence`: KL of predictions, on a model small enough to wait for."""

import pytest
import torch

from bench import divergence

SMALL = divergence.CONFIG | {
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def test_what_rounds_more_diverges_more():
    of = {row.impl: row.rate for row in divergence.divergences(SMALL, 300, "cpu")}
    assert set(of) == {"bfloat16, auto", "float32, int8", "bfloat16, int8", "float32, fp8"}
    assert 0 < of["float32, int8"] < of["float32, fp8"] < 1e-2
    assert of["bfloat16, int8"] > of["float32, int8"]


def test_kl_of_two_coins():
    fair, biased = (torch.tensor([[p, 1 - p]], dtype=torch.float64).log() for p in (0.5, 0.25))
    assert divergence._kl(fair, fair) == 0
    assert divergence._kl(fair, biased).item() == pytest.approx(0.1438410362)
