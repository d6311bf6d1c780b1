"""Engines behind one interface: `load(name, folder, options)`.

An engine generates for a `Workload` and tells when each token came, if it can.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from bench.engine_workloads import Workload

TEMPERATURE = 0.6


@dataclass
class Timeline:
    """Of one workload, in seconds from its start."""

    output_tokens: int
    seconds: float
    # Of each request: when it came, and when each of its tokens did. Empty: the engine cannot tell.
    arrivals: list[float] = field(default_factory=list)
    tokens: list[list[float]] = field(default_factory=list)

    @property
    def to_first(self) -> list[float]:
        return [times[0] - at for at, times in zip(self.arrivals, self.tokens, strict=True)]

    @property
    def between(self) -> list[float]:
        return [later - earlier for times in self.tokens for earlier, later in pairwise(times)]


class Engine(Protocol):
    def run(self, workload: Workload) -> Timeline: ...


class _Echo:
    def __init__(self, folder: Path, options: Mapping[str, Any]) -> None:
        from echokernels.runtime.llm import LLM

        self._llm = LLM(folder, load_format="dummy", **options)
        self._count = 0

    def run(self, workload: Workload) -> Timeline:
        engine = self._llm.engine
        arrivals = workload.arrivals or [0.0] * len(workload.prompts)
        waiting = list(zip(arrivals, workload.prompts, workload.outputs, strict=True))[::-1]
        tokens: dict[str, list[float]] = {}
        start = time.perf_counter()
        while waiting or engine.has_unfinished:
            now = time.perf_counter() - start
            while waiting and waiting[-1][0] <= now:
                _, prompt, count = waiting.pop()
                tokens[self._add(prompt, count)] = []
            if not engine.has_unfinished:
                time.sleep(min(0.001, waiting[-1][0] - now))
                continue
            changed = engine.step()
            now = time.perf_counter() - start
            for output in changed:
                times = tokens[output.request_id]
                times += [now] * (len(output.token_ids) - len(times))
        seconds = time.perf_counter() - start
        came = list(tokens.values())
        return Timeline(sum(map(len, came)), seconds, arrivals, came)

    def _add(self, prompt: list[int], count: int) -> str:
        from echokernels.runtime.sampling_params import SamplingParams

        self._count += 1
        params = SamplingParams(temperature=TEMPERATURE, ignore_eos=True, max_tokens=count)
        return self._llm.engine.add_request(f"bench-{self._count}", prompt, params).request_id


class _NanoVllm:
    """nano-vllm, if its package `nanovllm` can be imported. Needs weights in the folder."""

    def __init__(self, folder: Path, options: Mapping[str, Any]) -> None:
        from nanovllm import LLM  # type: ignore[import-not-found]

        self._llm = LLM(str(folder), max_model_len=4096, **options)

    def run(self, workload: Workload) -> Timeline:
        from nanovllm import SamplingParams

        params = [
            SamplingParams(temperature=TEMPERATURE, ignore_eos=True, max_tokens=count)
            for count in workload.outputs
        ]
        start = time.perf_counter()
        outputs = self._llm.generate(workload.prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        return Timeline(sum(len(output["token_ids"]) for output in outputs), seconds)


class _Transformers:
    """Continuous batching of Hugging Face's transformers, with random weights of its own."""

    def __init__(self, folder: Path, options: Mapping[str, Any]) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

        config = AutoConfig.from_pretrained(folder)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model: Any = AutoModelForCausalLM.from_config(
                config, attn_implementation="paged|sdpa", **options
            )
        # No id ends a request.
        sampling = GenerationConfig(
            do_sample=True, temperature=TEMPERATURE, top_k=0, eos_token_id=-1, pad_token_id=0
        )
        self._manager = model.eval().init_continuous_batching(generation_config=sampling)
        self._manager.start()

    def run(self, workload: Workload) -> Timeline:
        start = time.perf_counter()
        for prompt, count in zip(workload.prompts, workload.outputs, strict=True):
            self._manager.add_request(prompt, max_new_tokens=count)
        finished = made = 0
        while finished < len(workload.prompts):
            output = self._manager.get_result(timeout=0.05)
            if output is None:
                if not self._manager.is_running():
                    raise RuntimeError("generation stopped")
            elif output.error:
                raise RuntimeError(output.error)
            elif output.is_finished():
                finished += 1
                made += len(output.generated_tokens)
        return Timeline(made, time.perf_counter() - start)


ENGINES: Mapping[str, Callable[[Path, Mapping[str, Any]], Engine]] = {
    "echo": _Echo,
    "nano-vllm": _NanoVllm,
    "transformers": _Transformers,
}


def percentile(values: Sequence[float], share: float) -> float:
    """The least value that `share` of all do not exceed."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
