"""Plain PyTorch forms of the ops of experts: their definition and the CPU implementation."""

import torch

from echokernels._reference import accumulable, linear
from echokernels.activation import reference as activation_reference
from echokernels.sampling.reference import clean

ACTIVATIONS = ("none", *activation_reference.ACTIVATIONS)
"""Of the gate of a gated MLP; "none": there is none."""


def topk_softmax(
    weights: torch.Tensor, ids: torch.Tensor, logits: torch.Tensor, renormalize: bool
) -> None:
    logits = clean(logits)
    _choose(weights, ids, _softmax(logits), logits, renormalize, 1.0)


def grouped_topk(
    weights: torch.Tensor,
    ids: torch.Tensor,
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    num_groups: int,
    topk_groups: int,
    sigmoid: bool,
    renormalize: bool,
    scaling_factor: float,
) -> None:
    logits = clean(logits)
    scores = logits.sigmoid() if sigmoid else _softmax(logits)
    choice = scores if bias is None else clean(scores + bias.to(scores.dtype))
    of_groups = choice.clamp_min(-torch.finfo(torch.float32).max).unflatten(1, (num_groups, -1))
    summed = min(1 if bias is None else 2, of_groups.shape[2])
    group_scores = of_groups.topk(summed, 2).values.sum(2)
    kept = torch.zeros_like(group_scores, dtype=torch.bool)
    kept.scatter_(1, _best(group_scores, topk_groups), True)
    choice = of_groups.masked_fill(~kept[..., None], -torch.inf).flatten(1)
    _choose(weights, ids, scores, choice, renormalize, scaling_factor)


def _softmax(logits: torch.Tensor) -> torch.Tensor:
    """Of equal shares where all logits are -inf."""
    peak = logits.amax(1, keepdim=True)
    exponentials = (logits - peak).where(logits < peak, 0.0).exp()
    return exponentials / exponentials.sum(1, keepdim=True)


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` largest of each row, lower ones first where scores are equal."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]


def _choose(
    weights: torch.Tensor,
    ids: torch.Tensor,
    scores: torch.Tensor,
    choice: torch.Tensor,
    renormalize: bool,
    scaling_factor: float,
) -> None:
    chosen = _best(choice, ids.shape[1])
    chosen_scores = scores.gather(1, chosen)
    if renormalize:
        total = chosen_scores.sum(1, keepdim=True)
        # Sigmoids may all be 0: equal shares.
        chosen_scores = (chosen_scores / total).where(total > 0, 1 / ids.shape[1])
    weights.copy_(chosen_scores * scaling_factor)
    ids.copy_(chosen)


def _by_expert(
    ids: torch.Tensor, num_experts: int, expert_start: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(choices, their experts, how many each expert has), of the experts that are here."""
    experts = ids.flatten().long() - expert_start
    choices = ((experts >= 0) & (experts < num_experts)).nonzero()[:, 0]
    experts = experts[choices]
    order = experts.argsort(stable=True)
    return choices[order], experts[order], experts.bincount(minlength=num_experts)


def moe_align(
    sorted_ids: torch.Tensor,
    block_experts: torch.Tensor,
    num_padded: torch.Tensor,
    ids: torch.Tensor,
    num_experts: int,
    block_size: int,
    expert_start: int = 0,
) -> None:
    choices, experts, counts = _by_expert(ids, num_experts, expert_start)
    blocks = (counts + block_size - 1) // block_size
    room = blocks * block_size
    gaps = (room.cumsum(0) - room) - (counts.cumsum(0) - counts)
    sorted_ids.fill_(ids.numel())
    sorted_ids[torch.arange(len(choices)) + gaps[experts]] = choices.int()
    owners = torch.arange(num_experts, dtype=torch.int32).repeat_interleave(blocks)
    block_experts.fill_(-1)
    block_experts[: len(owners)] = owners
    num_padded.fill_(int(room.sum()))


def moe_permute(
    permuted: torch.Tensor,
    expert_offsets: torch.Tensor,
    source_rows: torch.Tensor,
    x: torch.Tensor,
    ids: torch.Tensor,
    num_experts: int,
    expert_start: int = 0,
) -> None:
    choices, _, counts = _by_expert(ids, num_experts, expert_start)
    expert_offsets[0] = 0
    expert_offsets[1:] = counts.cumsum(0)
    rows = torch.full((ids.numel(),), -1, dtype=source_rows.dtype)
    rows[choices] = torch.arange(len(choices), dtype=source_rows.dtype)
    source_rows.copy_(rows.view(ids.shape))
    permuted[: len(choices)] = x[choices // ids.shape[1]]


def moe_unpermute(
    out: torch.Tensor, permuted: torch.Tensor, source_rows: torch.Tensor, weights: torch.Tensor
) -> None:
    total = accumulable(permuted).new_zeros(out.shape)
    for row, weight in zip(source_rows.T.long(), weights.T, strict=True):
        here = row >= 0
        total[here] += weight[here, None].to(total.dtype) * accumulable(permuted[row[here]])
    out.copy_(total)


def grouped_gemm(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    expert_offsets: torch.Tensor,
    row_weights: torch.Tensor | None,
    activation: str,
) -> None:
    bounds = expert_offsets.tolist()
    for of_expert, begin, end in zip(weight, bounds, bounds[1:], strict=False):
        if begin == end:
            continue
        y = linear(x[begin:end], of_expert, None)
        if activation != "none":
            product = y.new_empty(end - begin, out.shape[1])
            activation_reference.ACTIVATIONS[activation](product, y)
            y = product
        if row_weights is not None:
            y = y * row_weights[begin:end, None].to(y.dtype)
        out[begin:end] = y


def fused_moe(
    out: torch.Tensor,
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    activation: str,
    expert_start: int = 0,
    workspace: torch.Tensor | None = None,  # noqa: ARG001
) -> None:
    num_experts, num_ids = w1.shape[0], ids.numel()
    permuted = x.new_empty(num_ids, x.shape[1])
    offsets = torch.empty(num_experts + 1, dtype=torch.int64)
    rows = torch.empty(ids.shape, dtype=torch.int64)
    moe_permute(permuted, offsets, rows, x, ids, num_experts, expert_start)
    hidden = accumulable(x).new_empty(num_ids, w2.shape[2])
    grouped_gemm(hidden, permuted, w1, offsets, None, activation)
    products = hidden.new_empty(num_ids, out.shape[1])
    grouped_gemm(products, hidden, w2, offsets, None, "none")
    moe_unpermute(out, products, rows, weights)
