"""Choices (a token and one of its experts) in the order of their experts, found on the device: a
counting sort in chunks, without atomics, so the same in every run.

    count   each program counts the choices of one chunk by expert
    place   each program adds up what comes before its chunk, sorts the chunk by expert, and knows
            where each of its choices goes

With a single chunk there is nothing to count first: one launch.
"""

import torch
import triton
import triton.language as tl

from echokernels._launch import launch, scratch
from echokernels._pdl import early_launch, let_next_start, wait_for_previous

CHUNK = 512


@triton.jit
def _load_experts(
    ids_ptr, start, num_ids, k, ids_stride, expert_start, num_experts, CHUNK: tl.constexpr
):
    """Of the choices from `start` on, counted from the first local expert; num_experts for those
    that are elsewhere or do not exist."""
    choice = start + tl.arange(0, CHUNK)
    place = (choice // k).to(tl.int64) * ids_stride + choice % k
    expert = tl.load(ids_ptr + place, mask=choice < num_ids, other=-1) - expert_start
    is_local = (choice < num_ids) & (expert >= 0) & (expert < num_experts)
    return tl.where(is_local, expert, num_experts).to(tl.int32)


@triton.jit
def _fill(ptr, size, value):
    """Each program its share."""
    BLOCK: tl.constexpr = 1024
    for start in range(tl.program_id(0) * BLOCK, size, tl.num_programs(0) * BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(ptr + i, tl.zeros([BLOCK], tl.int32) + value, mask=i < size)


@triton.jit(do_not_specialize=["num_ids", "capacity", "num_blocks", "expert_start"])
def _count_kernel(
    counts_ptr,  # i32 [chunks, BLOCK_E]
    sorted_ids_ptr,  # i32 [capacity], filled with num_ids; unused without ALIGN
    block_experts_ptr,  # i32 [num_blocks], filled with -1; unused without ALIGN
    ids_ptr,  # int [num_ids / k, k]
    num_ids,
    k,
    ids_stride,
    expert_start,
    num_experts,
    capacity,
    num_blocks,
    ALIGN: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    chunk = tl.program_id(0)
    expert = _load_experts(
        ids_ptr, chunk * CHUNK, num_ids, k, ids_stride, expert_start, num_experts, CHUNK
    )
    let_next_start(PDL)
    bins = tl.arange(0, BLOCK_E)
    tl.store(counts_ptr + chunk.to(tl.int64) * BLOCK_E + bins, tl.histogram(expert, BLOCK_E))
    if ALIGN:
        _fill(sorted_ids_ptr, capacity, num_ids)
        _fill(block_experts_ptr, num_blocks, -1)


@triton.jit(do_not_specialize=["num_ids", "capacity", "num_blocks", "expert_start", "num_chunks"])
def _place_kernel(
    ids_ptr,  # int [num_ids / k, k]
    sorted_ids_ptr,  # i32 [capacity] with ALIGN; else i32 [num_ids] or None
    block_experts_ptr,  # i32 [num_blocks]; unused without ALIGN
    num_padded_ptr,  # int [1]; unused without ALIGN
    rows_ptr,  # int [num_ids / k, k]; unused with ALIGN
    offsets_ptr,  # int [num_experts + 1]; unused with ALIGN
    counts_ptr,  # i32 [num_chunks, BLOCK_E]; unused with a single chunk
    num_ids,
    k,
    ids_stride,
    rows_stride,
    expert_start,
    num_experts,
    capacity,
    num_blocks,
    num_chunks,
    block_size,
    ALIGN: tl.constexpr,  # experts begin at multiples of block_size; else one behind the other
    SINGLE: tl.constexpr,  # chunk
    CHUNK: tl.constexpr,
    BLOCK_E: tl.constexpr,  # more than num_experts
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    chunk = tl.program_id(0)
    expert = _load_experts(
        ids_ptr, chunk * CHUNK, num_ids, k, ids_stride, expert_start, num_experts, CHUNK
    )
    own = tl.histogram(expert, BLOCK_E)
    let_next_start(PDL)
    bins = tl.arange(0, BLOCK_E)
    if SINGLE:
        before = tl.zeros([BLOCK_E], tl.int32)
        total = own
        if ALIGN:
            _fill(sorted_ids_ptr, capacity, num_ids)
            _fill(block_experts_ptr, num_blocks, -1)
            tl.debug_barrier()  # some of it is overwritten below, by other threads
    else:
        before, total = _add_up(counts_ptr, chunk, num_chunks, BLOCK_E)
    total = tl.where(bins < num_experts, total, 0)
    room = tl.cdiv(total, block_size) * block_size if ALIGN else total
    end = tl.cumsum(room, 0)
    first = end - room

    order = tl.sort(expert * CHUNK + tl.arange(0, CHUNK))
    expert = order // CHUNK
    # The n-th of the chunk in order comes after those of its expert, and after all of others, in
    # chunks before.
    place = tl.gather(first + before - (tl.cumsum(own, 0) - own), expert, 0) + tl.arange(0, CHUNK)
    choice = chunk * CHUNK + order % CHUNK
    is_local = expert < num_experts
    if sorted_ids_ptr is not None:
        tl.store(sorted_ids_ptr + place, choice, mask=is_local)
    if ALIGN:
        blocks = room // block_size
        for i in range(chunk, tl.max(blocks, 0), tl.num_programs(0)):
            tl.store(block_experts_ptr + first // block_size + i, bins, mask=i < blocks)
        if chunk == 0:
            tl.store(num_padded_ptr, tl.max(end, 0).to(num_padded_ptr.dtype.element_ty))
    else:
        at = (choice // k).to(tl.int64) * rows_stride + choice % k
        row = tl.where(is_local, place, -1)
        tl.store(rows_ptr + at, row.to(rows_ptr.dtype.element_ty), mask=choice < num_ids)
        if chunk == 0:
            first = first.to(offsets_ptr.dtype.element_ty)
            tl.store(offsets_ptr + bins, first, mask=bins <= num_experts)


@triton.jit
def _add_up(counts_ptr, chunk, num_chunks, BLOCK_E: tl.constexpr):
    """([experts] of the chunks before, of all)"""
    BLOCK_C: tl.constexpr = 8
    before = tl.zeros([BLOCK_E], tl.int32)
    total = tl.zeros([BLOCK_E], tl.int32)
    bins = tl.arange(0, BLOCK_E)[None, :]
    for start in range(0, num_chunks, BLOCK_C):
        other = (start + tl.arange(0, BLOCK_C))[:, None]
        ptrs = counts_ptr + other.to(tl.int64) * BLOCK_E + bins
        count = tl.load(ptrs, mask=other < num_chunks, other=0)
        total += tl.sum(count, 0)
        before += tl.sum(tl.where(other < chunk, count, 0), 0)
    return before, total


def num_counts(num_ids: int, num_experts: int) -> int:
    """Int32 of memory that `order` takes for the counts of its chunks."""
    return triton.cdiv(num_ids, CHUNK) * triton.next_power_of_2(num_experts + 1)


def order(
    ids: torch.Tensor,
    num_experts: int,
    expert_start: int,
    block_size: int,
    *,
    sorted_ids: torch.Tensor | None = None,
    block_experts: torch.Tensor | None = None,
    num_padded: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> None:
    """Launches what finds the order of `ids`: with block_experts into the first three, else into
    rows and offsets, and into sorted_ids if given. counts: int32, `num_counts` of them, memory."""
    aligns = block_experts is not None
    num_ids, k = ids.numel(), ids.shape[1]
    # Without choices there are still zeros to write.
    num_chunks = max(triton.cdiv(num_ids, CHUNK), 1)
    chunk = min(CHUNK, max(triton.next_power_of_2(num_ids), 16))
    block_e = triton.next_power_of_2(num_experts + 1)
    sizes = 0, 0
    if sorted_ids is not None and block_experts is not None:
        sizes = sorted_ids.shape[0], block_experts.shape[0]
    shared = {"ALIGN": aligns, "CHUNK": chunk, "BLOCK_E": block_e, **early_launch(ids.device)}
    if num_chunks > 1:
        if counts is None:
            counts = scratch((num_counts(num_ids, num_experts),), torch.int32, ids.device)
        launch(
            _count_kernel, (num_chunks,), counts, sorted_ids, block_experts, ids, num_ids, k,
            ids.stride(0), expert_start, num_experts, *sizes, num_warps=4, **shared,
        )  # fmt: skip
    launch(
        _place_kernel, (num_chunks,), ids, sorted_ids, block_experts, num_padded, rows, offsets,
        counts, num_ids, k, ids.stride(0), 0 if rows is None else rows.stride(0), expert_start,
        num_experts, *sizes, num_chunks, block_size, SINGLE=num_chunks == 1, num_warps=4, **shared,
    )  # fmt: skip
