"""SmolLM2-135M-Instruct, greedy in fp32, gives every token that transformers gave.

`tests/data/smollm2_golden_fp32.json` was made with transformers 5.24 from the same GGUF file,
dequantised to fp32.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from echokernels._target import INTERPRETED
from echokernels.runtime import LLM, SamplingParams

pytestmark = pytest.mark.skipif(INTERPRETED, reason="hours in the interpreter")

GOLDENS = json.loads(
    (Path(__file__).parents[1] / "data" / "smollm2_golden_fp32.json").read_text("utf-8")
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=96)


@pytest.fixture(scope="module")
def llm(demo_model: Path, device: torch.device) -> LLM:
    return LLM(demo_model, device=device, dtype="float32", max_model_len=512)


def test_goldens_together(llm: LLM) -> None:
    """All at once, from messages: template, tokenizer, mixed batches and text are right too."""
    conversations = [[{"role": "user", "content": golden["prompt"]}] for golden in GOLDENS]
    outputs = llm.chat(conversations, GREEDY)
    for golden, output in zip(GOLDENS, outputs, strict=True):
        assert output.error is None
        assert output.prompt_token_ids == golden["prompt_ids"]
        assert output.token_ids == golden["gen_ids"]
        assert output.text == golden["text"].removesuffix("<|im_end|>")
        ended = golden["text"].endswith("<|im_end|>")
        assert output.finish_reason == ("stop" if ended else "length")


@pytest.mark.parametrize("golden", GOLDENS, ids=["capital", "ocean", "sky"])
def test_golden_alone_and_streamed(llm: LLM, golden: dict[str, Any]) -> None:
    stream = llm.stream(golden["prompt_ids"], GREEDY)
    assert "".join(stream) == golden["text"].removesuffix("<|im_end|>")
    assert stream.output.token_ids == golden["gen_ids"]
