"""A scheduled step as the tensors that the model and the attention kernels read.

Tokens of all sequences lie one after the other. Decodes, with a single token each, come first:

    input_ids, positions, slot_mapping  | d0 | d1 | d2 | chunk of s3 . | chunk of s4 . |
    cu_seqlens_q of the chunks                         0               n3              n3 + n4

Everything is built with NumPy as int32 and goes to the device in one copy. The id of a token that
is still being sampled is not known here: its row is listed in `late_rows` and filled in on the
device.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

from echokernels.runtime.scheduler import ScheduledBatch
from echokernels.runtime.sequence import PLACEHOLDER_ID, Sequence

# In int32 elements: every array begins at a multiple of 16 bytes, the alignment that kernels are
# specialised on.
_ALIGNMENT = 4


@dataclass(frozen=True, slots=True)
class DecodeMetadata:
    """Sequences with one query each: that of their last token."""

    block_table: torch.Tensor  # i32[num_decodes, max_pages], 0 beyond a sequence's own pages
    seqused_k: torch.Tensor  # i32[num_decodes], tokens in the cache, the query's own among them


@dataclass(frozen=True, slots=True)
class ChunkMetadata:
    """Sequences with several queries each: those of their last tokens."""

    block_table: torch.Tensor  # i32[num_chunks, max_pages], 0 beyond a sequence's own pages
    seqused_k: torch.Tensor  # i32[num_chunks], tokens in the cache, the queries' own among them
    cu_seqlens_q: torch.Tensor  # i32[num_chunks + 1]
    max_seqlen_q: int
    max_seqlen_k: int


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where the step's K and V go, and what its queries see."""

    slot_mapping: torch.Tensor  # i32[num_tokens], page * page_size + offset; below 0: not kept
    decodes: DecodeMetadata | None
    chunks: ChunkMetadata | None


@dataclass(frozen=True, slots=True)
class ModelInput:
    """One step."""

    input_ids: torch.Tensor  # i32[num_tokens]
    positions: torch.Tensor  # i32[num_tokens]
    attention: AttentionMetadata
    sample_rows: torch.Tensor  # i32[num_samples], the tokens whose successor is sampled
    late_rows: torch.Tensor  # i32[num_late], the tokens whose id is still in flight
    late_sources: torch.Tensor  # i32[num_late], where among the ids in flight it is


def pack_batch(
    batch: ScheduledBatch,
    page_size: int,
    device: torch.device,
    in_flight: Mapping[Sequence, int] | None = None,
) -> ModelInput:
    """The tensors of `batch`, which must hold at least one token.

    `in_flight` tells where, among the ids in flight, the last one of a sequence will be.
    """
    entries = batch.entries
    counts = np.array([entry.num_tokens for entry in entries])
    seqused_k = np.array([entry.start for entry in entries]) + counts
    ends = np.cumsum(counts)  # one past each sequence's last row
    input_ids = np.array(
        [
            token_id
            for entry in entries
            for token_id in entry.seq.token_ids[entry.start : entry.start + entry.num_tokens]
        ]
    )
    block_table = _pad([entry.seq.block_table for entry in entries])
    positions = np.arange(len(input_ids)) + np.repeat(seqused_k - ends, counts)
    pages = block_table[np.repeat(np.arange(len(entries)), counts), positions // page_size]
    # A token in flight is its sequence's only one in the step, a decode: its row is the entry's
    # index.
    late_rows = np.flatnonzero(input_ids == PLACEHOLDER_ID)
    late_sources = [(in_flight or {})[entries[row].seq] for row in late_rows]
    n = batch.num_decodes
    sent = _upload(
        {
            "input_ids": input_ids,
            "positions": positions,
            "slot_mapping": pages * page_size + positions % page_size,
            "sample_rows": ends[[entry.samples for entry in entries]] - 1,
            "late_rows": late_rows,
            "late_sources": np.array(late_sources),
            "decode_table": block_table[:n],
            "decode_lens": seqused_k[:n],
            "chunk_table": block_table[n:],
            "chunk_lens": seqused_k[n:],
            "cu_seqlens_q": np.concatenate(([n], ends[n:])) - n,
        },
        device,
    )
    decodes = chunks = None
    if n > 0:
        decodes = DecodeMetadata(sent["decode_table"], sent["decode_lens"])
    if n < len(entries):
        chunks = ChunkMetadata(
            sent["chunk_table"],
            sent["chunk_lens"],
            sent["cu_seqlens_q"],
            max_seqlen_q=int(counts[n:].max()),
            max_seqlen_k=int(seqused_k[n:].max()),
        )
    return ModelInput(
        sent["input_ids"],
        sent["positions"],
        AttentionMetadata(sent["slot_mapping"], decodes, chunks),
        sent["sample_rows"],
        sent["late_rows"],
        sent["late_sources"],
    )


def _pad(block_tables: Seq[Seq[int]]) -> np.ndarray:
    padded = np.zeros((len(block_tables), max(map(len, block_tables))), np.int64)
    for row, block_table in zip(padded, block_tables, strict=True):
        row[: len(block_table)] = block_table
    return padded


def _upload(arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, torch.Tensor]:
    """Each array as an int32 tensor on `device`. They share one buffer, and so one copy."""
    starts = np.cumsum(
        [0] + [-(-array.size // _ALIGNMENT) * _ALIGNMENT for array in arrays.values()]
    )
    # A copy from pinned memory does not wait for what the device still has to do.
    buffer = torch.empty(int(starts[-1]), dtype=torch.int32, pin_memory=device.type == "cuda")
    host = buffer.numpy()
    for start, array in zip(starts, arrays.values(), strict=False):
        host[start : start + array.size] = array.ravel()
    uploaded = buffer.to(device, non_blocking=True)
    return {
        name: uploaded[start : start + array.size].view(array.shape)
        for start, (name, array) in zip(starts, arrays.items(), strict=False)
    }
