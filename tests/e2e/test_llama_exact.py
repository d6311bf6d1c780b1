"""A tiny random Llama, greedy in fp32, is token-exact with transformers, however it is scheduled,
and with KV caches of codes token-exact with the same arithmetic in plain PyTorch.

A step reads every key from its page, its own tokens' too: so what a code is does not depend on how
a prompt is cut into chunks, or on whether its pages were given up and computed again.

Under TRITON_INTERPRET=1 one small case runs, through every kernel that a Llama needs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from echokernels._target import INTERPRETED
from echokernels.runtime import LLM, SamplingParams, layers
from tests.quantised_llama import with_cache_of
from tests.tiny_llama import greedy, save, tiny_llama

NUM_TOKENS = 20
# Around the borders of pages of 4 and 16 and of chunks of 3 and 17; 70 is longer than a chunk of
# 64.
PROMPT_LENGTHS = (1, 3, 4, 15, 16, 17, 33, 70)
PROMPTS = [[(7 * i + 13 * n) % 127 + 1 for i in range(n)] for n in PROMPT_LENGTHS]
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)

takes_long_interpreted = pytest.mark.skipif(INTERPRETED, reason="minutes in the interpreter")


class Case:
    """A saved model and what transformers generates for each prompt."""

    def __init__(
        self, folder: Path, kv_cache_dtype: str = "auto", seed: int = 0, **changes: Any
    ) -> None:
        self.kv_cache_dtype = kv_cache_dtype
        model = tiny_llama(seed, **changes)
        self.folder = save(model, folder, tokenizer=False)
        model = with_cache_of(model, kv_cache_dtype)
        self.expected = [greedy(model, prompt, NUM_TOKENS) for prompt in PROMPTS]

    def assert_exact(
        self, device: torch.device, num_prompts: int = len(PROMPTS), **options: Any
    ) -> LLM:
        """Generates from the first `num_prompts` prompts at once, with `options` of the engine."""
        options |= {"dtype": "float32", "kv_cache_dtype": self.kv_cache_dtype, "warmup": False}
        llm = LLM(self.folder, device=device, **options)
        outputs = [
            llm.engine.add_request(str(index), prompt, GREEDY)
            for index, prompt in enumerate(PROMPTS[:num_prompts])
        ]
        while llm.engine.has_unfinished:
            llm.engine.step()
            llm.engine.check()
        for output, expected in zip(outputs, self.expected, strict=False):
            assert output.finish_reason == "length", output.error
            assert output.token_ids == expected, f"prompt of {len(output.prompt_token_ids)} tokens"
        assert llm.engine.stats().num_used_pages == 0
        return llm


@pytest.fixture(
    scope="module", params=["auto", "int8", pytest.param("fp8", marks=takes_long_interpreted)]
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("llama"), request.param)


@takes_long_interpreted
@pytest.mark.parametrize("chunk", [1, 3, 17, 64, None])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_any_page_size_and_chunk(
    case: Case, device: torch.device, page_size: int, chunk: int | None
) -> None:
    case.assert_exact(device, page_size=page_size, max_prefill_chunk=chunk, num_pages=1024)


@takes_long_interpreted
@pytest.mark.parametrize("budget", [8, 40])
def test_any_token_budget(case: Case, device: torch.device, budget: int) -> None:
    case.assert_exact(device, max_num_batched_tokens=budget, page_size=4, num_pages=256)


@takes_long_interpreted
@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
@pytest.mark.parametrize("page_size", [1, 4])
def test_a27_forced_preemption(
    case: Case, device: torch.device, page_size: int, steps_in_flight: int
) -> None:
    # 96 slots: the longest request needs 90 of them, all together 309.
    llm = case.assert_exact(
        device,
        page_size=page_size,
        num_pages=96 // page_size,
        max_prefill_chunk=17,
        max_steps_in_flight=steps_in_flight,
    )
    assert llm.engine.stats().num_preemptions > 0


@takes_long_interpreted
@pytest.mark.parametrize("steps_in_flight", [2, 3])
def test_tokens_known_late(case: Case, device: torch.device, steps_in_flight: int) -> None:
    case.assert_exact(device, num_pages=64, max_steps_in_flight=steps_in_flight)


def test_small_mixed_batch_with_preemption(case: Case, device: torch.device) -> None:
    if INTERPRETED and case.kv_cache_dtype != "auto":
        pytest.skip("a minute in the interpreter, through the kernels of the next test")
    # 6 pages of 4 hold one whole request of at most 24 tokens and the beginning of another. Chunks
    # of 2 meet decodes in one step.
    llm = case.assert_exact(device, num_prompts=3, page_size=4, num_pages=6, max_prefill_chunk=2)
    assert llm.engine.stats().num_preemptions > 0


def test_fused_projections(
    case: Case, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a GPU in 16 bits: what decodes and small chunks project is fused, chunks of 11 are not.
    monkeypatch.setattr(layers, "fuses_projections", lambda x, _weight: x.shape[0] <= 8)
    monkeypatch.setattr(layers, "_weight", layers._parameter)
    case.assert_exact(device, num_prompts=4, page_size=4, num_pages=64, max_prefill_chunk=11)


@takes_long_interpreted
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"tie_word_embeddings": True}, id="tied"),
        pytest.param({"num_key_value_heads": 4}, id="one head per KV head"),
        pytest.param({"num_key_value_heads": 1}, id="one KV head"),
        pytest.param({"num_attention_heads": 6, "hidden_size": 96}, id="groups of 3"),
        pytest.param({"head_dim": 24}, id="q wider than the hidden size"),
        pytest.param({"attention_bias": True, "mlp_bias": True}, id="biases"),
        pytest.param(
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 10_000.0,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 32,
                }
            },
            id="llama3 rope",
        ),
    ],
)
def test_any_shape(
    tmp_path: Path, device: torch.device, changes: dict[str, Any], kv_cache_dtype: str
) -> None:
    Case(tmp_path, kv_cache_dtype, seed=1, **changes).assert_exact(
        device, page_size=4, num_pages=256, max_prefill_chunk=17
    )
