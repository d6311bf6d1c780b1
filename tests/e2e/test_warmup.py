"""After warm-up no step compiles: whatever an engine is asked for, its kernels are ready.

On a GPU under `no_jit`. On the CPU by what Triton would specialise the kernels on, as their
launchers would launch them on an H100: each op of a step also runs its launcher, which is caught
before it launches.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import echokernels
from echokernels import _l2, _launch
from echokernels._library import OPS
from echokernels._target import INTERPRETED, KNOWN_TARGETS, assume
from echokernels.runtime import LLM, SamplingParams, layers
from tests.tiny_llama import save, tiny_llama

LIMITS = {"max_num_seqs": 6, "max_num_batched_tokens": 90, "max_model_len": 200}


class Launches(TorchDispatchMode):
    """Collects what every op would launch, as Triton tells kernels apart."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[Any, ...]] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "echo":
            full = args + tuple(a.default_value for a in func._schema.arguments[len(args) :])
            with mock.patch.object(_launch, "_run", self._note), assume(KNOWN_TARGETS["sm_90"]):
                OPS[func._schema.name.removeprefix("echo::")].triton(*full)
        return func(*args, **(kwargs or {}))

    def _note(self, kernel: Any, _grid: Any, values: Any, options: dict[str, Any]) -> None:
        given = {
            parameter.name: _specialised(value, parameter.do_not_specialize)
            for parameter, value in zip(kernel.params, values, strict=False)
        }
        self.seen.add(
            (kernel.__name__, *sorted((given | options).items(), key=lambda item: item[0]))
        )


def _specialised(value: Any, is_free: bool) -> object:
    if isinstance(value, torch.Tensor):
        return (value.dtype, is_free or value.data_ptr() % 16 == 0)
    if isinstance(value, int) and not isinstance(value, bool):
        wide = not -(2**31) <= value < 2**31
        return ("int", wide) if is_free else ("int", wide, value == 1, value % 16 == 0)
    return None if value is None else type(value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_llama(), tmp_path_factory.mktemp("llama"), tokenizer=False)


def mixed_traffic(llm: LLM, seed: int, num_requests: int = 24) -> list[str]:
    """Requests of all lengths while others run: chunks, decodes, preemptions, samplers. Returns the
    errors of those that failed: the engine goes on without them."""
    rng = random.Random(seed)
    errors = []
    waiting = num_requests
    while waiting or llm.engine.has_unfinished:
        if waiting and rng.random() < 0.6:
            waiting -= 1
            prompt = [rng.randrange(1, 128) for _ in range(rng.choice((1, 2, 7, 30, 60, 90, 150)))]
            params = SamplingParams(
                max_tokens=rng.randrange(1, 40),
                ignore_eos=True,
                seed=seed,
                temperature=rng.choice((0.0, 1.0)),
                top_k=rng.choice((0, 5)),
                top_p=rng.choice((1.0, 0.9)),
            )
            llm.engine.add_request(str(waiting), prompt, params)
        if llm.engine.has_unfinished:
            errors += [output.error for output in llm.engine.step() if output.error is not None]
    return errors


@pytest.mark.skipif(INTERPRETED, reason="interpreted kernels have no parameters to specialise")
@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("streamed_bytes", [_l2.STREAMED_BYTES, 10_240])  # never, within a chunk
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8"])
def test_warmup_launches_all_that_traffic_does(
    folder: Path,
    page_size: int,
    streamed_bytes: int,
    kv_cache_dtype: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_l2, "STREAMED_BYTES", streamed_bytes)
    monkeypatch.setattr(layers, "FUSED_TOKENS", 16)
    monkeypatch.setattr(
        layers, "fuses_projections", lambda x, _weight: x.shape[0] <= layers.FUSED_TOKENS
    )
    monkeypatch.setattr(layers, "_weight", layers._parameter)
    options: dict[str, Any] = {"page_size": page_size, "num_pages": 208 // page_size}
    options["kv_cache_dtype"] = kv_cache_dtype
    llm = LLM(folder, device="cpu", dtype="bfloat16", **options, **LIMITS)
    with Launches() as ready:
        llm.engine.runner.warmup()
    with Launches() as needed:
        assert mixed_traffic(llm, seed=page_size) == []
    assert llm.engine.stats().num_preemptions > 0
    kernels = {name for name, *_ in needed.seen}
    assert len(kernels) >= 8, kernels
    assert not needed.seen - ready.seen


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("page_size", [4, 16])
def test_nothing_compiles_after_warmup(
    tmp_path: Path, cuda: torch.device, dtype: str, kv_cache_dtype: str, page_size: int
) -> None:
    # With heads of 64 and pages of 16 chunks go to the kernel for Hopper.
    heads = {} if page_size == 4 else {"head_dim": 64}
    folder = save(tiny_llama(**heads), tmp_path, tokenizer=False)
    pages: dict[str, Any] = {"page_size": page_size, "num_pages": 208 // page_size}
    pages["kv_cache_dtype"] = kv_cache_dtype
    llm = LLM(folder, device=cuda, dtype=dtype, **pages, **LIMITS)
    with echokernels.no_jit():
        assert mixed_traffic(llm, seed=1) == []
    assert llm.engine.stats().num_preemptions > 0


@pytest.mark.gpu
def test_without_warmup_something_compiles(tmp_path: Path, cuda: torch.device) -> None:
    # A head of another size: kernels that no other test has compiled.
    odd = save(tiny_llama(head_dim=24, hidden_size=96), tmp_path, tokenizer=False)
    llm = LLM(odd, device=cuda, dtype="bfloat16", page_size=4, num_pages=52, warmup=False)
    with echokernels.no_jit():
        errors = mixed_traffic(llm, seed=1, num_requests=2)
    assert errors
    assert all("within no_jit" in error for error in errors)
