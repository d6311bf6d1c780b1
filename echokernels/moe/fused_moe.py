"""The experts of a layer: gated MLPs of which each token takes k.

    out[t] = sum over j of weights[t, j] * mlp(x[t], expert ids[t, j])
    mlp(x, e) = (act(x Wg^T) * (x Wu^T)) W2^T        w1[e] = [Wg; Wu], w2[e] = W2

x: [tokens, hidden], w1: [experts, 2 * width, hidden], w2: [experts, hidden, width]; weights, fp32,
and ids: [tokens, k], as a router returns them; act as in gated.py. The activation's result is
rounded to the dtype of x, the MLP's too unless choices are few, and the sum into `out`, which is
mutated, as is `workspace`.

A few choices are taken as they come, in two launches (_direct.py). More take four, or five above
512: choices in the order of their experts (_order.py), both products (grouped_gemm.py), of which
the first gathers its rows from x, and the weighted sum of each token's rows (permute.py), in which
no two programs add to the same number. Experts are those from expert_start on: a token of which
none is here gets 0, so ranks of an expert-parallel group add up their outputs.
"""

import math

import torch
import triton

from echokernels._checks import (
    FLOATS,
    INDEX,
    check_bytes,
    check_contiguous,
    check_dim,
    check_dtype,
    check_last_contiguous,
    check_one_of,
    check_range,
    check_same_device,
    check_shape,
)
from echokernels._launch import scratch
from echokernels._library import define_op
from echokernels.activation.reference import ACTIVATIONS
from echokernels.moe import reference
from echokernels.moe._direct import launch_direct
from echokernels.moe._order import num_counts, order
from echokernels.moe.grouped_gemm import launch_grouped_gemm
from echokernels.moe.permute import launch_unpermute
from echokernels.moe.routing import MAX_CHOSEN, MAX_EXPERTS

_ALIGNMENT = 256


def fused_moe_workspace_size(
    num_tokens: int,
    k: int,
    hidden: int,
    width: int,
    num_experts: int,
    dtype: torch.dtype = torch.bfloat16,
) -> int:
    """Bytes of `workspace` that serve every call of up to num_tokens tokens: w1 is
    [num_experts, 2 * width, hidden]."""
    for name, value in (("num_tokens", num_tokens), ("hidden", hidden), ("width", width)):
        check_range(name, value, 0)
    check_range("k", k, 1, MAX_CHOSEN)
    check_range("num_experts", num_experts, 1, MAX_EXPERTS)
    return sum(_sizes(num_tokens * k, hidden, width, num_experts, dtype.itemsize))


def _sizes(num_ids: int, hidden: int, width: int, num_experts: int, itemsize: int) -> list[int]:
    """Bytes of each piece: what is between the products, what comes after them, where each choice
    stands, the choice that stands there, where experts begin, and counts of chunks."""
    sizes = [
        num_ids * width * itemsize, num_ids * hidden * itemsize, num_ids * 4, num_ids * 4,
        (num_experts + 1) * 4, num_counts(num_ids, num_experts) * 4,
    ]  # fmt: skip
    return [triton.cdiv(size, _ALIGNMENT) * _ALIGNMENT for size in sizes]


def _pieces(
    workspace: torch.Tensor | None, sizes: list[int], device: torch.device
) -> list[torch.Tensor]:
    """uint8 each, in the workspace given or newly allocated."""
    if workspace is None:
        memory = scratch((sum(sizes),), torch.uint8, device)
    else:
        memory = workspace.view(-1).view(torch.uint8)
    pieces, at = [], 0
    for size in sizes:
        pieces.append(memory[at : at + size])
        at += size
    return pieces


def _as(piece: torch.Tensor, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return piece.view(dtype)[: math.prod(shape)].view(shape)


def _check(
    out: torch.Tensor,
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    activation: str,
    expert_start: int = 0,
    workspace: torch.Tensor | None = None,
) -> None:
    check_dim("x", x, 2)
    check_dtype("x", x, FLOATS)
    check_dim("w2", w2, 3)
    num_experts, hidden, width = w2.shape
    check_range("w2.shape[0]", num_experts, 1, MAX_EXPERTS)
    check_range("w2.shape[2]", width, 1)
    check_shape("x", x, None, hidden)
    check_shape("w1", w1, num_experts, 2 * width, hidden)
    check_shape("out", out, *x.shape)
    for name, tensor in (("w1", w1), ("w2", w2), ("out", out)):
        check_dtype(name, tensor, (x.dtype,))
    check_shape("ids", ids, x.shape[0], None)
    check_dtype("ids", ids, INDEX)
    check_range("ids.shape[1]", ids.shape[1], 1, MAX_CHOSEN)
    check_shape("weights", weights, *ids.shape)
    check_dtype("weights", weights, (torch.float32,))
    check_one_of("activation", activation, ACTIVATIONS)
    check_range("expert_start", expert_start, 0)
    for name, tensor in (
        ("x", x), ("w1", w1), ("w2", w2), ("out", out), ("ids", ids), ("weights", weights),
    ):  # fmt: skip
        check_last_contiguous(name, tensor)
    check_same_device("x", x, w1=w1, w2=w2, out=out, weights=weights, ids=ids, workspace=workspace)
    if workspace is not None:
        _check_workspace(workspace, ids.numel(), hidden, width, num_experts, x.element_size())


def _check_workspace(workspace: torch.Tensor, *shape: int) -> None:
    check_contiguous("workspace", workspace)
    begin = workspace.storage_offset() * workspace.element_size()
    if begin % _ALIGNMENT:
        raise ValueError(
            f"workspace begins at byte {begin} of its storage, must be a multiple of {_ALIGNMENT}"
        )
    check_bytes("workspace", workspace, sum(_sizes(*shape)), "fused_moe_workspace_size")


def _takes_direct(num_tokens: int, k: int, num_experts: int) -> bool:
    """Whether choices are taken as they come: few of them have an expert in common (H200, Qwen3: 4
    tokens 73 us, by expert 76; 8 tokens 139, by expert 129)."""
    return num_tokens == 1 or 4 * num_tokens * k <= num_experts


def _launch(
    out: torch.Tensor,
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    activation: str,
    expert_start: int = 0,
    workspace: torch.Tensor | None = None,
) -> None:
    num_ids, k = ids.numel(), ids.shape[1]
    if num_ids == 0:
        return
    num_experts, hidden, width = w2.shape
    sizes = _sizes(num_ids, hidden, width, num_experts, x.element_size())
    between, products, rows, choices, offsets, counts = _pieces(workspace, sizes, x.device)
    between = _as(between, x.dtype, num_ids, width)
    if _takes_direct(ids.shape[0], k, num_experts):
        launch_direct(out, between, x, w1, w2, weights, ids, activation, expert_start)
        return
    products = _as(products, x.dtype, num_ids, hidden)
    rows = _as(rows, torch.int32, *ids.shape)
    choices = _as(choices, torch.int32, num_ids)
    offsets = _as(offsets, torch.int32, num_experts + 1)
    order(
        ids, num_experts, expert_start, 1, sorted_ids=choices, rows=rows, offsets=offsets,
        counts=counts.view(torch.int32),
    )  # fmt: skip
    launch_grouped_gemm(between, x, w1, offsets, None, activation, choices, k)
    launch_grouped_gemm(products, between, w2, offsets, None, "none", early_weights=True)
    launch_unpermute(out, products, rows, weights)


_fused_moe = define_op(
    "fused_moe(Tensor(a!) out, Tensor x, Tensor w1, Tensor w2, Tensor weights, Tensor ids, "
    "str activation, int expert_start=0, Tensor(b!)? workspace=None) -> ()",
    check=_check,
    triton=_launch,
    reference=reference.fused_moe,
)


def fused_moe(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    *,
    activation: str = "silu",
    expert_start: int = 0,
    workspace: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """[tokens, hidden]: for each token the weighted sum of its experts' gated MLPs.

    x: [tokens, hidden], fp16, bf16 or fp32. w1: [experts, 2 * width, hidden], the gate projection's
        rows, then the up projection's. w2: [experts, hidden, width]. All of one dtype, last
        dimension contiguous. fp32 is multiplied exactly (no TF32).
    weights, ids: fp32, and int32 or int64, [tokens, k], as `topk_softmax` returns them.
    activation: "silu", "gelu" (erf) or "gelu_tanh", of the gate.
    expert_start: the id of w1[0]; choices of experts that are not here add nothing.
    workspace: scratch of `fused_moe_workspace_size` bytes; allocated when absent.
    out: where the result goes; a new tensor by default.

    Raises:
        TypeError, ValueError: A dtype, shape, stride, size or device does not fit.
    """
    if out is None:
        out = torch.empty_like(x)
    _fused_moe(out, x, w1, w2, weights, ids, activation, expert_start, workspace)
    return out
