"""From logits to token ids: the sampling tensors of a step, and the call of `echo.sample`.

The noise of a draw is a function of the request's seed and of the place that the token takes in its
sequence. So neither the batch nor a preemption changes what a request draws.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
import torch

import echokernels
from echokernels.runtime.sampling_params import SamplingParams
from echokernels.runtime.scheduler import ScheduledBatch

_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class SamplingInput:
    """One row for each entry of a batch that samples, in order."""

    temperature: torch.Tensor  # f32[num_samples]
    top_k: torch.Tensor  # i32[num_samples], 0 for all
    top_p: torch.Tensor  # f32[num_samples]
    min_p: torch.Tensor  # f32[num_samples]
    seeds: torch.Tensor  # i64[num_samples]
    positions: torch.Tensor  # i32[num_samples], the places of the sampled tokens in their sequences
    banned: tuple[torch.Tensor, torch.Tensor] | None
    """Rows and ids, i64[num_banned] each, of the stop tokens that `min_tokens` forbids."""


def derive_seed(engine_seed: int, request_index: int) -> int:
    """The seed, in 64 bits, of a request that brings none: as if drawn, and no two are equal.

    Both mixing steps are those of SplitMix64 (Steele et al., "Fast Splittable Pseudorandom Number
    Generators", 2014), which map 64 bits one to one.
    """
    return _mix(_mix(engine_seed) + request_index)


def pack_sampling(
    batch: ScheduledBatch,
    eos_token_ids: Collection[int],
    vocab_size: int,
    device: torch.device,
) -> SamplingInput:
    """The sampling tensors of `batch`. Every request that is not greedy must have a seed."""
    entries = [entry for entry in batch.entries if entry.samples]
    params = [entry.seq.params for entry in entries]
    positions = [entry.start + entry.num_tokens for entry in entries]
    outputs = [
        position - entry.seq.num_prompt_tokens
        for position, entry in zip(positions, entries, strict=True)
    ]
    # Rows of int32: two of them hold the seeds, three are read as fp32.
    buffer = torch.empty(7, len(entries), dtype=torch.int32, pin_memory=device.type == "cuda")
    host = buffer.numpy()
    host[:2].reshape(-1).view(np.uint64)[:] = [_seed(p) for p in params]
    # Temperatures beyond fp32 are as good as infinite.
    host[2].view(np.float32)[:] = [min(p.temperature, 1e38) for p in params]
    host[3].view(np.float32)[:] = [p.top_p for p in params]
    host[4].view(np.float32)[:] = [p.min_p for p in params]
    host[5] = [min(p.top_k, vocab_size) for p in params]
    host[6] = positions
    sent = buffer.to(device, non_blocking=True)
    temperature, top_p, min_p = sent[2:5].view(torch.float32)
    return SamplingInput(
        temperature=temperature,
        top_k=sent[5],
        top_p=top_p,
        min_p=min_p,
        seeds=sent[:2].view(-1).view(torch.int64),
        positions=sent[6],
        banned=_banned(zip(params, outputs, strict=True), eos_token_ids, vocab_size, device),
    )


def sample_tokens(logits: torch.Tensor, inputs: SamplingInput) -> torch.Tensor:
    """Samples one id per row of `logits`, [num_samples, vocab]: i64[num_samples], on their device.

    Sets the logits of banned ids to -inf.
    """
    if inputs.banned is not None:
        logits[inputs.banned] = -torch.inf
    return echokernels.sample(
        logits,
        inputs.temperature,
        inputs.top_k,
        inputs.top_p,
        inputs.min_p,
        inputs.seeds,
        inputs.positions,
    )


def _banned(
    rows: Iterable[tuple[SamplingParams, int]],  # with the number of outputs so far
    eos_token_ids: Collection[int],
    vocab_size: int,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    pairs = [
        (row, token_id)
        for row, (params, num_outputs) in enumerate(rows)
        if num_outputs < params.min_tokens
        for token_id in (*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids))
        if token_id < vocab_size
    ]
    if not pairs:
        return None
    buffer = torch.tensor(pairs, pin_memory=device.type == "cuda")
    row, token_id = buffer.to(device, non_blocking=True).unbind(1)
    return row, token_id


def _seed(params: SamplingParams) -> int:
    assert params.seed is not None or params.temperature == 0, "the engine seeds every request"
    return (params.seed or 0) & _MASK


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31
