"""The quality of caches of codes, on a tiny model."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
import torch

from bench import quality
from echokernels._target import INTERPRETED
from echokernels.runtime.loader import load_model
from tests.quantised_llama import with_cache_of
from tests.tiny_llama import save, tiny_llama

pytestmark = pytest.mark.skipif(INTERPRETED, reason="minutes in the interpreter")

TEXT = "What is said twice is said too often. " * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_llama(), tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8"])
def test_predictions_are_those_of_plain_pytorch(
    folder: Path, kv_cache_dtype: str, chunk: int
) -> None:
    windows = [[5, 6, 7, 5, 6, 7, 9, 20, 20], [9, 1], list(range(1, 60))]
    found = quality.predict(*load_model(folder, device="cpu"), kv_cache_dtype, windows, chunk)
    oracle = with_cache_of(tiny_llama(), kv_cache_dtype)
    logits = [oracle(torch.tensor([window])).logits[0, :-1] for window in windows]
    targets = torch.tensor([token for window in windows for token in window[1:]])
    losses = torch.nn.functional.cross_entropy(torch.cat(logits), targets, reduction="none")
    assert torch.equal(found.likeliest, torch.cat(logits).argmax(-1))
    assert torch.allclose(found.losses, losses.double(), rtol=1e-4, atol=1e-4)
    assert found.perplexity == pytest.approx(math.exp(losses.double().mean()), rel=1e-4)


def test_the_file_has_a_row_for_each_cache(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "quality.csv"
    text.write_text(TEXT)
    args = [text, "--model", folder, "--device", "cpu", "--window", 50, "--chunk", 8, "--out", out]
    args += ["--kv-cache-dtype", "int8", "fp8"]
    assert quality.main([str(arg) for arg in args]) == 0
    rows = {(row["op"], row["impl"]): row for row in csv.DictReader(out.open())}
    expected = [("perplexity", impl) for impl in ("auto", "int8", "fp8")]
    expected += [("top-1 agreement", impl) for impl in ("int8", "fp8")]
    assert [*rows] == expected
    assert {row["note"] for row in rows.values()} == {f"of {len(TEXT) - 4} tokens"}
    exact, int8, fp8 = (float(rows["perplexity", impl]["rate"]) for impl in ("auto", "int8", "fp8"))
    assert exact != int8 != fp8
    for impl in ("int8", "fp8"):
        assert 0 < float(rows["top-1 agreement", impl]["rate"]) <= 1
    assert "perplexity, int8: " in capsys.readouterr().out


def test_texts_and_windows_that_cannot_be_measured(folder: Path) -> None:
    tokenizer = quality.load_tokenizer(folder)
    with pytest.raises(ValueError, match="window is 1, must be at least 2"):
        quality.windows_of(TEXT, tokenizer, 1)
    with pytest.raises(ValueError, match="text is 1 tokens long"):
        quality.windows_of("a", tokenizer, 8)
    model = load_model(folder, device="cpu")
    with pytest.raises(ValueError, match="window is 257, must be at most 256"):
        quality.predict(*model, "auto", [[1] * 257], 64)
