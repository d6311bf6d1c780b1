"""Runs scheduled steps on the device: owns the model, the KV cache and the ids in flight.

    execute(batch):  pack -> forward -> logits of the rows that sample -> sample

`execute` only launches. The ids it samples stay on the device until `StepHandle.token_ids` waits
for them, and a step launched before that takes them from there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import torch

import echokernels
from echokernels.runtime._validation import check_number
from echokernels.runtime.batch import ModelInput, pack_batch
from echokernels.runtime.cache_memory import (
    CPU_CACHE_BYTES,
    allocate_caches,
    cache_place,
    free_bytes,
    pages_within,
)
from echokernels.runtime.config import EngineConfig, ModelConfig
from echokernels.runtime.layers import KVCache, Placement
from echokernels.runtime.models.registry import CausalLM
from echokernels.runtime.sampler import pack_sampling, sample_tokens
from echokernels.runtime.sampling_params import SamplingParams
from echokernels.runtime.scheduler import ScheduledBatch, ScheduledSequence
from echokernels.runtime.sequence import Sequence


class StepHandle:
    """The ids that a launched step samples, one for each entry that samples, in order."""

    def __init__(self, seqs: list[Sequence], sampled: torch.Tensor) -> None:
        self.seqs = seqs
        self.sampled = sampled  # i64[num_samples], on the device
        self.is_read = False
        self._host = sampled
        self._done: torch.cuda.Event | None = None
        if sampled.is_cuda:
            self._host = torch.empty_like(sampled, device="cpu", pin_memory=True)
            self._host.copy_(sampled, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record(torch.cuda.current_stream(sampled.device))

    def token_ids(self) -> list[int]:
        """Waits for the step. The ids count as known from now on: commit them before the next."""
        self.is_read = True
        if self._done is not None:
            self._done.synchronize()
        return self._host.tolist()


class ModelRunner:
    """`config` is the engine's with `max_model_len` and `num_pages` settled."""

    def __init__(
        self,
        model: CausalLM,
        model_config: ModelConfig,
        config: EngineConfig,
        place: Placement,
        gpu_memory_utilization: float = 0.9,
    ) -> None:
        """Allocates the KV cache: `config.num_pages` pages, or what memory allows.

        That is, on a GPU, its share `gpu_memory_utilization` less what is in use and what a full
        step needs; on a CPU 1 GiB. Raises ValueError for limits beyond the model's or the memory's,
        and for a `kv_cache_dtype` that the GPU cannot compute with.
        """
        self.model = model
        self.model_config = model_config
        self.place = place
        self._cache_place = cache_place(config.kv_cache_dtype, place)
        self._in_flight: list[StepHandle] = []
        self._caches: list[KVCache] = []
        max_model_len = _max_model_len(config, model_config)
        self.config = dataclasses.replace(config, max_model_len=max_model_len)
        if config.num_pages is None:
            num_pages = self._num_pages_that_fit(gpu_memory_utilization)
            self.config = dataclasses.replace(self.config, num_pages=num_pages)
        self._caches = self._allocate(self.num_pages)

    @property
    def num_pages(self) -> int:
        assert self.config.num_pages is not None
        return self.config.num_pages

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> StepHandle:
        """Launches a step and returns without waiting for a GPU."""
        inputs = self._pack(batch)
        hidden = self.model(inputs.input_ids, inputs.positions, self._caches, inputs.attention)
        if batch.num_samples:
            sampled = self._sample(batch, hidden[inputs.sample_rows])
        else:
            sampled = torch.empty(0, dtype=torch.int64, device=self.place.device)
        handle = StepHandle([entry.seq for entry in batch.entries if entry.samples], sampled)
        self._in_flight.append(handle)
        return handle

    def warmup(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compiles what any step can need, by running steps of no use; see `echokernels.warmup`.

        Writes to page 0, so to be called before the first request. progress: (done, total).
        """
        config = self.config
        assert config.max_model_len is not None
        echokernels.warmup(
            lambda step: self.execute(_step_of(*step, config.page_size)).token_ids(),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            progress=progress,
        )
        self._in_flight = []

    def _pack(self, batch: ScheduledBatch) -> ModelInput:
        self._in_flight = [handle for handle in self._in_flight if not handle.is_read]
        # A sequence sampled by several steps in flight goes on from the last: later entries win.
        sources = [seq for handle in self._in_flight for seq in handle.seqs]
        in_flight = {seq: index for index, seq in enumerate(sources)}
        inputs = pack_batch(batch, self.config.page_size, self.place.device, in_flight)
        if inputs.late_rows.numel():
            ids = torch.cat([handle.sampled for handle in self._in_flight])
            inputs.input_ids[inputs.late_rows] = ids[inputs.late_sources].to(torch.int32)
        return inputs

    def _sample(self, batch: ScheduledBatch, hidden: torch.Tensor) -> torch.Tensor:
        config = self.model_config
        inputs = pack_sampling(batch, config.eos_token_ids, config.vocab_size, self.place.device)
        return sample_tokens(self.model.compute_logits(hidden), inputs)

    def _allocate(self, num_pages: int) -> list[KVCache]:
        page_size = self.config.page_size
        return allocate_caches(self.model_config, num_pages, page_size, self._cache_place)

    def _num_pages_that_fit(self, gpu_memory_utilization: float) -> int:
        check_number("gpu_memory_utilization", gpu_memory_utilization, low=0, high=1)
        device = self.place.device
        num_bytes = CPU_CACHE_BYTES
        if device.type == "cuda":
            num_bytes = free_bytes(device, gpu_memory_utilization, self._measure_step())
        return pages_within(num_bytes, self.model_config, self.config, self._cache_place.dtype)

    def _measure_step(self) -> int:
        """Bytes of GPU memory that the largest step needs beside weights and cache."""
        device = self.place.device
        # All sequences write to one page: the sizes are right.
        self._caches = self._allocate(1)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        self.execute(_largest_step(self.config)).token_ids()
        peak = torch.cuda.max_memory_allocated(device)
        self._caches = []
        self._in_flight = []
        torch.cuda.empty_cache()
        return peak - before


def _max_model_len(config: EngineConfig, model_config: ModelConfig) -> int:
    limit = model_config.max_position_embeddings
    if config.max_model_len is None:
        return limit
    if config.max_model_len > limit:
        raise ValueError(
            f"max_model_len is {config.max_model_len}, must be at most {limit}, the model's"
        )
    return config.max_model_len


def _largest_step(config: EngineConfig) -> ScheduledBatch:
    """All sequences that may run, all sampling, with chunks that fill the budget."""
    assert config.max_model_len is not None
    chunk = min(config.max_model_len, config.max_num_batched_tokens)
    num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
    num_chunks = min(num_seqs, config.max_num_batched_tokens // chunk)
    return _step_of([1] * (num_seqs - num_chunks) + [chunk] * num_chunks, 1, config.page_size)


def _step_of(query_lens: Iterable[int], max_seqlen_k: int, page_size: int) -> ScheduledBatch:
    """A step of new sequences, all sampling, with tables of at least `max_seqlen_k` tokens. All
    their pages are page 0: what they compute is of no use."""
    entries = []
    for num_tokens in query_lens:
        # top_p takes the sampler's longest way.
        seq = Sequence("no request", [0] * num_tokens, SamplingParams(top_p=0.5, seed=0))
        seq.block_table = [0] * -(-max(num_tokens, max_seqlen_k) // page_size)
        entries.append(ScheduledSequence(seq, 0, num_tokens, samples=True))
    return ScheduledBatch(entries)
