"""A scheduled step becomes tensors: every token at its place, with its own sequence's pages."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echokernels.runtime.batch import ModelInput, pack_batch
from echokernels.runtime.sampling_params import SamplingParams
from echokernels.runtime.scheduler import ScheduledBatch, ScheduledSequence
from echokernels.runtime.sequence import Sequence

CPU = torch.device("cpu")


def sequence(token_ids: list[int], block_table: list[int]) -> Sequence:
    seq = Sequence("request", token_ids, SamplingParams())
    seq.block_table = block_table
    return seq


def pack(
    *entries: tuple[Sequence, int, int, bool], page_size: int = 4, in_flight=None
) -> ModelInput:
    """Entries are (sequence, start, number of tokens, samples)."""
    batch = ScheduledBatch([ScheduledSequence(*entry) for entry in entries])
    return pack_batch(batch, page_size, CPU, in_flight)


def test_a_mixed_batch() -> None:
    decode = sequence([10, 11, 12, 13, 14, 15], [7, 2])
    chunk = sequence([20, 21, 22, 23, 24, 25, 26, 27, 28], [5, 0, 9])
    prompt = sequence([30, 31], [3])
    inputs = pack((decode, 5, 1, True), (chunk, 3, 4, False), (prompt, 0, 2, True))

    assert inputs.input_ids.tolist() == [15, 23, 24, 25, 26, 30, 31]
    assert inputs.positions.tolist() == [5, 3, 4, 5, 6, 0, 1]
    # Position 3 is the last of page 5, position 4 the first of page 0.
    assert inputs.attention.slot_mapping.tolist() == [9, 23, 0, 1, 2, 12, 13]
    assert inputs.sample_rows.tolist() == [0, 6]
    assert inputs.late_rows.tolist() == []

    decodes, chunks = inputs.attention.decodes, inputs.attention.chunks
    assert decodes is not None
    assert decodes.block_table.tolist() == [[7, 2, 0]]
    assert decodes.seqused_k.tolist() == [6]
    assert chunks is not None
    assert chunks.block_table.tolist() == [[5, 0, 9], [3, 0, 0]]
    assert chunks.seqused_k.tolist() == [7, 2]
    assert chunks.cu_seqlens_q.tolist() == [0, 4, 6]
    assert (chunks.max_seqlen_q, chunks.max_seqlen_k) == (4, 7)


def test_only_decodes_or_only_chunks() -> None:
    seq = sequence([1, 2, 3], [0])
    assert pack((seq, 2, 1, True)).attention.chunks is None
    inputs = pack((seq, 0, 3, False))
    assert inputs.attention.decodes is None
    assert inputs.sample_rows.shape == (0,)


@pytest.mark.parametrize(
    ("position", "slot"),
    [
        (3, 2 * 4 + 3),  # the 4th token fills the first page
        (4, 6 * 4 + 0),
        (7, 6 * 4 + 3),  # the 8th token, an exact multiple of the page
    ],
)
def test_a08_slot_of_an_exact_multiple(position: int, slot: int) -> None:
    seq = sequence(list(range(8)), [2, 6])
    assert pack((seq, position, 1, True)).attention.slot_mapping.tolist() == [slot]


def test_a_token_in_flight_is_listed_with_its_source() -> None:
    known, first, second = (sequence([5, 6], [page]) for page in range(3))
    for seq in (first, second):
        seq.append_placeholder()
    inputs = pack(
        (first, 2, 1, True),
        (known, 1, 1, True),
        (second, 2, 1, True),
        in_flight={second: 0, first: 4},
    )
    assert inputs.late_rows.tolist() == [0, 2]
    assert inputs.late_sources.tolist() == [4, 0]
    assert inputs.input_ids.tolist()[1] == 6


def test_one_upload_with_every_array_aligned() -> None:
    """Kernels are specialised on 16-byte alignment: without it they would be compiled again."""
    seq = sequence(list(range(7)), [0, 1])
    inputs = pack((seq, 6, 1, True), (sequence([1, 2, 3], [2]), 0, 3, True))
    attention = inputs.attention
    assert attention.decodes is not None
    assert attention.chunks is not None
    tensors = [
        inputs.input_ids,
        inputs.positions,
        inputs.sample_rows,
        inputs.late_rows,
        attention.slot_mapping,
        attention.decodes.block_table,
        attention.decodes.seqused_k,
        attention.chunks.block_table,
        attention.chunks.seqused_k,
        attention.chunks.cu_seqlens_q,
    ]
    base = inputs.input_ids.untyped_storage().data_ptr()
    for tensor in tensors:
        assert tensor.dtype == torch.int32
        assert tensor.untyped_storage().data_ptr() == base
        assert tensor.storage_offset() % 4 == 0


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), min_size=1, max_size=6),
    st.sampled_from([1, 3, 4, 16]),
)
def test_every_token_is_at_its_place(spans: list[tuple[int, int]], page_size: int) -> None:
    """Against a loop over tokens. Token ids tell sequence and position apart."""
    entries = []
    next_page = 0
    for number, (start, count) in enumerate(sorted(spans, key=lambda span: span[1] > 1)):
        num_pages = -(-(start + count) // page_size)
        seq = sequence(
            [1000 * number + position for position in range(start + count)],
            list(range(next_page, next_page + num_pages))[::-1],
        )
        next_page += num_pages
        entries.append((seq, start, count, number % 2 == 0))
    inputs = pack(*entries, page_size=page_size)
    rows = [
        (seq.token_ids[i], i, seq.block_table[i // page_size] * page_size + i % page_size)
        for seq, start, count, _ in entries
        for i in range(start, start + count)
    ]
    packed = zip(
        inputs.input_ids.tolist(),
        inputs.positions.tolist(),
        inputs.attention.slot_mapping.tolist(),
        strict=True,
    )
    assert list(packed) == rows
    sampled = [seq.token_ids[-1] for seq, _, _, samples in entries if samples]
    assert inputs.input_ids[inputs.sample_rows].tolist() == sampled


@pytest.mark.gpu
def test_the_upload_reaches_the_device(cuda: torch.device) -> None:
    batch = ScheduledBatch([ScheduledSequence(sequence([1, 2, 3], [4]), 0, 3, True)])
    inputs = pack_batch(batch, 4, cuda)
    assert inputs.input_ids.device.type == "cuda"
    assert inputs.attention.slot_mapping.tolist() == [16, 17, 18]
