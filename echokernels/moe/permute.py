"""Choices in the order of their experts: as an index for kernels that gather, and as rows.

    moe_align       sorted_ids: choices (token * k + its place) by expert, from the lowest to the
                    highest; each expert's begin at a multiple of block_size and are filled up with
                    tokens * k. block_experts: whose each block of block_size is, -1: nobody's.
                    num_padded: how many of sorted_ids there are; behind them it is filled up, too
    moe_permute     permuted[source_rows[t, j]] = x[t], rows by expert;
                    expert_offsets[e]: the first row of expert e, [num_experts]: the end
    moe_unpermute   out[t] = sum over j of weights[t, j] * permuted[source_rows[t, j]]

`ids` are [tokens, k]. Experts are those from expert_start on, num_experts of them, and are counted
from there; choices of others contribute nothing: they are in no order, and their source_rows are
-1. So ranks of an expert-parallel group each call the ops with their range, and add up their
outputs. Within an expert choices keep their order. Nothing waits for the host, and nothing depends
on the order in which programs run. Sums are in fp32, j by j, and rounded once.

Outputs are mutated: the first three arguments of moe_align and moe_permute, the first of
moe_unpermute. Rows of `permuted` beyond the last are not written.
"""

import torch
import triton
import triton.language as tl

from echokernels._checks import (
    FLOATS,
    INDEX,
    check_dim,
    check_dtype,
    check_last_contiguous,
    check_range,
    check_same_device,
    check_shape,
)
from echokernels._launch import launch
from echokernels._library import define_op
from echokernels._pdl import early_launch, let_next_start, wait_for_previous
from echokernels.moe import reference
from echokernels.moe._order import order
from echokernels.moe.routing import MAX_CHOSEN, MAX_EXPERTS


@triton.jit
def _permute_kernel(
    permuted_ptr,  # [num_tokens * K, width]
    x_ptr,  # [num_tokens, width]
    rows_ptr,  # int [num_tokens, K]
    width,
    permuted_stride,
    x_stride,
    rows_stride,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    wait_for_previous(PDL)
    x = tl.load(x_ptr + token * x_stride + column, mask=column < width, other=0.0)
    let_next_start(PDL)
    for j in tl.static_range(K):
        row = tl.load(rows_ptr + token * rows_stride + j).to(tl.int64)
        out = permuted_ptr + row * permuted_stride + column
        tl.store(out, x, mask=(column < width) & (row >= 0))


@triton.jit
def _unpermute_kernel(
    out_ptr,  # [num_tokens, width]
    permuted_ptr,  # [rows, width]
    rows_ptr,  # int [num_tokens, K]
    weights_ptr,  # f32 [num_tokens, K]
    width,
    out_stride,
    permuted_stride,
    rows_stride,
    weights_stride,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    wait_for_previous(PDL)
    total = tl.zeros([BLOCK_N], tl.float32)
    for j in tl.static_range(K):
        row = tl.load(rows_ptr + token * rows_stride + j).to(tl.int64)
        weight = tl.load(weights_ptr + token * weights_stride + j)
        ptrs = permuted_ptr + row * permuted_stride + column
        x = tl.load(ptrs, mask=(column < width) & (row >= 0), other=0.0).to(tl.float32)
        total += tl.where(row >= 0, weight, 0.0) * x
    let_next_start(PDL)
    out = out_ptr + token * out_stride + column
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=column < width)


def moe_align_capacity(num_ids: int, num_experts: int, block_size: int) -> int:
    """How many `sorted_ids` the op may write for so many ids: every expert that has one wastes all
    but one place of a block. `block_experts` needs one for each block of them."""
    blocks = min(num_ids, num_experts) + max(num_ids - num_experts, 0) // block_size
    return blocks * block_size


def _check_ids(ids: torch.Tensor, num_experts: int, expert_start: int) -> None:
    check_dim("ids", ids, 2)
    check_dtype("ids", ids, INDEX)
    check_last_contiguous("ids", ids)
    check_range("ids.shape[1]", ids.shape[1], 1, MAX_CHOSEN)
    check_range("num_experts", num_experts, 1, MAX_EXPERTS)
    check_range("expert_start", expert_start, 0)


def _check_indices(name: str, tensor: torch.Tensor, ids: torch.Tensor, *shape: int | None) -> None:
    check_shape(name, tensor, *shape)
    check_last_contiguous(name, tensor)
    check_same_device("ids", ids, **{name: tensor})


def _check_moe_align(
    sorted_ids: torch.Tensor,
    block_experts: torch.Tensor,
    num_padded: torch.Tensor,
    ids: torch.Tensor,
    num_experts: int,
    block_size: int,
    expert_start: int = 0,
) -> None:
    _check_ids(ids, num_experts, expert_start)
    check_range("block_size", block_size, 1)
    for name, tensor in (("sorted_ids", sorted_ids), ("block_experts", block_experts)):
        _check_indices(name, tensor, ids, None)
        check_dtype(name, tensor, (torch.int32,))
    least = moe_align_capacity(ids.numel(), num_experts, block_size)
    check_range("sorted_ids.shape[0]", sorted_ids.shape[0], least)
    check_range("block_experts.shape[0]", block_experts.shape[0], least // block_size)
    _check_indices("num_padded", num_padded, ids, 1)
    check_dtype("num_padded", num_padded, INDEX)


def _check_moe_permute(
    permuted: torch.Tensor,
    expert_offsets: torch.Tensor,
    source_rows: torch.Tensor,
    x: torch.Tensor,
    ids: torch.Tensor,
    num_experts: int,
    expert_start: int = 0,
) -> None:
    _check_ids(ids, num_experts, expert_start)
    check_dim("x", x, 2)
    check_dtype("x", x, FLOATS)
    check_last_contiguous("x", x)
    check_shape("ids", ids, x.shape[0], None)
    check_shape("permuted", permuted, ids.numel(), x.shape[1])
    check_dtype("permuted", permuted, (x.dtype,))
    check_last_contiguous("permuted", permuted)
    for name, tensor, shape in (
        ("expert_offsets", expert_offsets, (num_experts + 1,)),
        ("source_rows", source_rows, tuple(ids.shape)),
    ):
        _check_indices(name, tensor, ids, *shape)
        check_dtype(name, tensor, INDEX)
    check_same_device("ids", ids, x=x, permuted=permuted)


def _check_moe_unpermute(
    out: torch.Tensor, permuted: torch.Tensor, source_rows: torch.Tensor, weights: torch.Tensor
) -> None:
    check_dim("permuted", permuted, 2)
    check_dtype("permuted", permuted, FLOATS)
    check_last_contiguous("permuted", permuted)
    check_dim("source_rows", source_rows, 2)
    check_dtype("source_rows", source_rows, INDEX)
    check_last_contiguous("source_rows", source_rows)
    check_range("source_rows.shape[1]", source_rows.shape[1], 1, MAX_CHOSEN)
    check_shape("weights", weights, *source_rows.shape)
    check_dtype("weights", weights, (torch.float32,))
    check_last_contiguous("weights", weights)
    check_shape("out", out, source_rows.shape[0], permuted.shape[1])
    check_dtype("out", out, (permuted.dtype,))
    check_last_contiguous("out", out)
    check_same_device("permuted", permuted, out=out, source_rows=source_rows, weights=weights)


def _launch_moe_align(
    sorted_ids: torch.Tensor,
    block_experts: torch.Tensor,
    num_padded: torch.Tensor,
    ids: torch.Tensor,
    num_experts: int,
    block_size: int,
    expert_start: int = 0,
) -> None:
    order(
        ids, num_experts, expert_start, block_size, sorted_ids=sorted_ids,
        block_experts=block_experts, num_padded=num_padded,
    )  # fmt: skip


def _launch_moe_permute(
    permuted: torch.Tensor,
    expert_offsets: torch.Tensor,
    source_rows: torch.Tensor,
    x: torch.Tensor,
    ids: torch.Tensor,
    num_experts: int,
    expert_start: int = 0,
) -> None:
    order(ids, num_experts, expert_start, 1, rows=source_rows, offsets=expert_offsets)
    width = x.shape[1]
    block_n, num_warps = _config(width)
    launch(
        _permute_kernel,
        (x.shape[0], triton.cdiv(width, block_n)),
        permuted,
        x,
        source_rows,
        width,
        permuted.stride(0),
        x.stride(0),
        source_rows.stride(0),
        K=ids.shape[1],
        BLOCK_N=block_n,
        num_warps=num_warps,
        **early_launch(x.device),
    )


def launch_unpermute(
    out: torch.Tensor, permuted: torch.Tensor, source_rows: torch.Tensor, weights: torch.Tensor
) -> None:
    width = permuted.shape[1]
    block_n, num_warps = _config(width)
    launch(
        _unpermute_kernel,
        (out.shape[0], triton.cdiv(width, block_n)),
        out,
        permuted,
        source_rows,
        weights,
        width,
        out.stride(0),
        permuted.stride(0),
        source_rows.stride(0),
        weights.stride(0),
        K=source_rows.shape[1],
        BLOCK_N=block_n,
        num_warps=num_warps,
        **early_launch(out.device),
    )


def _config(width: int) -> tuple[int, int]:
    """(columns of a program, warps): 16 bytes of bf16 for each thread of four warps, at most."""
    block_n = min(triton.next_power_of_2(max(width, 1)), 1024)
    return block_n, max(1, min(4, block_n // 256))


_moe_align = define_op(
    "moe_align(Tensor(a!) sorted_ids, Tensor(b!) block_experts, Tensor(c!) num_padded, Tensor ids, "
    "int num_experts, int block_size, int expert_start=0) -> ()",
    check=_check_moe_align,
    triton=_launch_moe_align,
    reference=reference.moe_align,
)
_moe_permute = define_op(
    "moe_permute(Tensor(a!) permuted, Tensor(b!) expert_offsets, Tensor(c!) source_rows, Tensor x, "
    "Tensor ids, int num_experts, int expert_start=0) -> ()",
    check=_check_moe_permute,
    triton=_launch_moe_permute,
    reference=reference.moe_permute,
)
_moe_unpermute = define_op(
    "moe_unpermute(Tensor(a!) out, Tensor permuted, Tensor source_rows, Tensor weights) -> ()",
    check=_check_moe_unpermute,
    triton=launch_unpermute,
    reference=reference.moe_unpermute,
)


def moe_align(
    ids: torch.Tensor, num_experts: int, block_size: int, expert_start: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(sorted_ids, block_experts, num_padded): choices by expert, in blocks of one expert each.

    ids: int32 or int64 [tokens, k], k at most 16: experts as a router chose them.
    num_experts, expert_start: the experts here, 1 to 512 from expert_start on; choices of others
        are left out.
    block_size: what a kernel takes at once.

    sorted_ids: int32, as many as there may have to be; token * k + j for ids[token, j], tokens * k
    where there is none. block_experts: int32, one for each block of them, counted from
    expert_start, -1 where there is none. num_padded: int32 [1].

    Raises:
        TypeError, ValueError: A dtype, shape or stride does not fit.
    """
    size = moe_align_capacity(ids.numel(), max(num_experts, 1), max(block_size, 1))
    sorted_ids, block_experts, num_padded = (
        torch.empty(n, dtype=torch.int32, device=ids.device)
        for n in (size, size // max(block_size, 1), 1)
    )
    _moe_align(sorted_ids, block_experts, num_padded, ids, num_experts, block_size, expert_start)
    return sorted_ids, block_experts, num_padded


def moe_permute(
    x: torch.Tensor,
    ids: torch.Tensor,
    num_experts: int,
    expert_start: int = 0,
    *,
    permuted: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(permuted, expert_offsets, source_rows): each token's row once for every choice, by expert.

    x: [tokens, width]; strided rows are taken as they are.
    ids, num_experts, expert_start: as in `moe_align`.
    permuted: where the rows go, [tokens * k, width]; a new tensor by default. Rows from
        expert_offsets[num_experts] on are not written.

    expert_offsets: int32 [num_experts + 1], where each expert's rows begin. source_rows: int32
    [tokens, k], where the row of each choice is, -1 for those of experts that are not here.

    Raises:
        TypeError, ValueError: A dtype, shape, stride or device does not fit.
    """
    if permuted is None:
        permuted = x.new_empty(ids.numel(), x.shape[-1])
    offsets = torch.empty(max(num_experts, 0) + 1, dtype=torch.int32, device=x.device)
    source_rows = torch.empty(ids.shape, dtype=torch.int32, device=x.device)
    _moe_permute(permuted, offsets, source_rows, x, ids, num_experts, expert_start)
    return permuted, offsets, source_rows


def moe_unpermute(
    permuted: torch.Tensor,
    source_rows: torch.Tensor,
    weights: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """[tokens, width]: for each token the sum of its choices' rows, by weight.

    permuted, source_rows: as `moe_permute` returns them; rows below 0 count as zeros.
    weights: fp32 [tokens, k].
    out: where the result goes, in the dtype of `permuted`; a new tensor by default.

    Raises:
        TypeError, ValueError: A dtype, shape, stride or device does not fit.
    """
    if out is None:
        out = permuted.new_empty(source_rows.shape[0], permuted.shape[-1])
    _moe_unpermute(out, permuted, source_rows, weights)
    return out
