"""The front end: load a model, generate text.

llm = LLM("path/to/model")
[output] = llm.generate("Once upon a time", SamplingParams(max_tokens=32))
for text in llm.stream_chat([{"role": "user", "content": "Hello!"}]):
    print(text, end="", flush=True)
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from echokernels.runtime.config import EngineConfig
from echokernels.runtime.engine import LLMEngine
from echokernels.runtime.loader import load_model
from echokernels.runtime.model_runner import ModelRunner
from echokernels.runtime.outputs import RequestMetrics, RequestOutput
from echokernels.runtime.progress import progress_bar, warmup_bar
from echokernels.runtime.sampling_params import SamplingParams
from echokernels.runtime.tokenizer import Tokenizer, load_tokenizer

Prompt = str | Seq[int]
Conversation = Seq[Mapping[str, Any]]


class TextStream:
    """The text of one request, piece by piece as it is made. Iterating drives the engine.

    `output` has all the rest. The request is aborted by `close`, and when the stream is dropped
    before its end. Raises RuntimeError at the end if the request failed.
    """

    def __init__(self, engine: LLMEngine, output: RequestOutput) -> None:
        self.output = output
        self._engine = engine
        self._num_given = 0
        self._abort = weakref.finalize(self, engine.abort, output.request_id)
        self._abort.atexit = False

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while len(self.output.text) == self._num_given:
            if self.output.error is not None:
                raise RuntimeError(self.output.error)
            if self.output.finished:
                raise StopIteration
            self._engine.step()
        piece = self.output.text[self._num_given :]
        self._num_given += len(piece)
        return piece

    def close(self) -> None:
        self._abort()


class LLM:
    """A model with an engine of its own. Not safe for use by several threads."""

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        load_format: str = "auto",
        gpu_memory_utilization: float = 0.9,
        max_steps_in_flight: int = 1,
        warmup: bool = True,
        **engine_options: Any,
    ) -> None:
        """Loads `model`, a folder as Hugging Face's or a .gguf file.

        A folder has config.json, safetensors and, unless token ids are all that goes in and comes
        out, tokenizer.json.
        dtype: "auto" is the checkpoint's on a GPU and float32 on a CPU.
        device: "auto" is the current GPU if there is one, else the CPU.
        load_format: "dummy" fills the weights at random, from the seed; config.json is enough then.
        gpu_memory_utilization: the share of the GPU's memory that may be used in all.
        max_steps_in_flight: 2 lets the host prepare a step while the device runs the one before.
        warmup: on a GPU, compile every kernel now, with a bar on stderr if that is a terminal; else
        the requests that first need one wait for it.
        engine_options: the fields of `EngineConfig`, such as kv_cache_dtype="int8".

        Raises ValueError or TypeError for a model or an option that cannot be used, and tells why.
        """
        allowed = [field.name for field in fields(EngineConfig)]
        for name in engine_options:
            if name not in allowed:
                raise TypeError(
                    f"{name} is not an engine option, must be one of {', '.join(allowed)}"
                )
        config = EngineConfig(**engine_options)
        network, model_config, place = load_model(model, dtype, device, load_format, config.seed)
        self.tokenizer = _find_tokenizer(Path(model))
        runner = ModelRunner(network, model_config, config, place, gpu_memory_utilization)
        if warmup and place.device.type == "cuda":
            with warmup_bar() as show:
                runner.warmup(show)
        self.engine = LLMEngine(
            runner, self.tokenizer, model_config.eos_token_ids, max_steps_in_flight
        )
        self._request_ids = (f"request-{number}" for number in itertools.count())

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """One output for each prompt, in order, once all are finished.

        prompts: text or token ids, or a list of such. sampling_params: for all, or one for each.
        progress: a bar on stderr, if that is a terminal. A prompt that cannot be served becomes an
        output with `finish_reason` "error" and the reason in `error`; the others are not affected.
        Raises ValueError or TypeError if `sampling_params` does not fit the prompts.
        """
        _check_list("prompts", prompts, "text, token ids, or a list of such")
        one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        return self._run(self._submit, [prompts] if one else prompts, sampling_params, progress)

    def chat(
        self,
        messages: Conversation | Seq[Conversation],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """As `generate`, for the assistant's next turn in each conversation.

        messages: a conversation, that is a list of {"role": "user", "content": "..."}, or a list of
        such. The model's chat template makes the prompt.
        """
        _check_list("messages", messages, "a list of messages, or a list of such lists")
        one = len(messages) > 0 and isinstance(messages[0], Mapping)
        return self._run(
            self._submit_chat, [messages] if one else messages, sampling_params, progress
        )

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> TextStream:
        """The text of one output as it is made. Raises ValueError or TypeError for a bad prompt."""
        return TextStream(self.engine, self._submit(prompt, sampling_params))

    def stream_chat(
        self, messages: Conversation, sampling_params: SamplingParams | None = None
    ) -> TextStream:
        """As `stream`, for the assistant's next turn in a conversation."""
        return TextStream(self.engine, self._submit_chat(messages, sampling_params))

    def _submit(self, prompt: Prompt, params: SamplingParams | None) -> RequestOutput:
        return self.engine.add_request(next(self._request_ids), prompt, params)

    def _submit_chat(self, messages: Conversation, params: SamplingParams | None) -> RequestOutput:
        if self.tokenizer is None:
            raise ValueError("messages need a tokenizer, and this model has none: give token ids")
        text = self.tokenizer.apply_chat_template(messages)
        # The template writes the special tokens itself.
        output = self._submit(self.tokenizer.encode(text, add_special_tokens=False), params)
        output.prompt = text
        return output

    def _run(
        self,
        submit: Callable[[Any, SamplingParams], RequestOutput],
        prompts: Seq[Any],
        sampling_params: SamplingParams | Seq[SamplingParams] | None,
        progress: bool,
    ) -> list[RequestOutput]:
        params = _one_for_each(sampling_params, len(prompts))
        outputs = [self._try(submit, *pair) for pair in zip(prompts, params, strict=True)]
        pending = {output.request_id for output in outputs if not output.finished}
        try:
            with progress_bar(len(outputs), progress) as show:
                while pending:
                    changed = self.engine.step()
                    pending.difference_update(o.request_id for o in changed if o.finished)
                    show(len(outputs) - len(pending), len(changed))
        finally:
            for request_id in pending:  # after an interrupt
                self.engine.abort(request_id)
        return outputs

    def _try(
        self,
        submit: Callable[[Any, SamplingParams], RequestOutput],
        prompt: Any,
        params: SamplingParams,
    ) -> RequestOutput:
        try:
            return submit(prompt, params)
        except (ValueError, TypeError) as error:
            return RequestOutput(
                request_id=next(self._request_ids),
                prompt=prompt if isinstance(prompt, str) else None,
                prompt_token_ids=[],
                metrics=RequestMetrics(time.perf_counter()),
                finish_reason="error",
                error=str(error),
            )


def _find_tokenizer(path: Path) -> Tokenizer | None:
    if path.is_dir() and not (path / "tokenizer.json").exists():
        return None
    return load_tokenizer(path)


def _check_list(name: str, value: object, allowed: str) -> None:
    if not isinstance(value, Seq):
        raise TypeError(f"{name} is {value!r}, must be {allowed}")


def _one_for_each(
    params: SamplingParams | Seq[SamplingParams] | None, num_prompts: int
) -> Seq[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    for index, item in enumerate(params):
        if not isinstance(item, SamplingParams):
            raise TypeError(f"sampling_params[{index}] is {item!r}, must be SamplingParams")
    if len(params) != num_prompts:
        raise ValueError(
            f"sampling_params are {len(params)}, must be one, or as many as prompts: {num_prompts}"
        )
    return params
