"""Cases of a mixture of experts: routing, choices by expert, rows moved there and back.

FULL is a Qwen3-30B-A3B: 128 experts, of which a token takes 8, hidden size 2,048.
"""

from collections.abc import Callable

import torch
from torch import Tensor

import echokernels
from bench import formulas
from bench.case import Case, Inputs, Outputs, returning
from bench.checks import against, as_tuple
from bench.inputs import randn
from bench.peers import formula_peers
from bench.suites import Suite

BF16, FP32, INT32 = 2, 4, 4  # bytes
ROUNDED = 2.0**-7
EXACT = 0.0


def experts(s: Suite) -> list[Case]:
    return [case(s, t) for case in (_route, _align, _permute, _unpermute) for t in s.routed_tokens]


def _logits(s: Suite, device: torch.device, tokens: int) -> Tensor:
    """In fp32: of equal logits libraries take different ones."""
    return randn(device, tokens, s.experts, dtype=torch.float32)


def _route(s: Suite, tokens: int) -> Case:
    return Case(
        "topk_softmax",
        f"T{tokens}_E{s.experts}_k{s.chosen}",
        make=lambda d: (_logits(s, d, tokens), s.chosen),
        run=echokernels.topk_softmax,
        check=against(formulas.topk_softmax),
        tolerance=ROUNDED,
        num_bytes=tokens * (s.experts * FP32 + s.chosen * (FP32 + INT32)),
        ceiling="copy",
        peers=formula_peers(formulas.topk_softmax, s.compile_modes),
    )


def _align(s: Suite, tokens: int) -> Case:
    """Together with the routing before it, as a layer does."""
    block_size = 64 if tokens > 64 else 16
    return Case(
        "moe_align",
        f"routed_T{tokens}_E{s.experts}_k{s.chosen}",
        make=lambda d: (_logits(s, d, tokens), s.chosen, block_size),
        run=_route_and_align,
        check=_by_expert,
        tolerance=EXACT,
        num_bytes=tokens * (s.experts * FP32 + s.chosen * (FP32 + 2 * INT32)),
        ceiling="copy",
        peers={"torch": returning(formulas.route_and_align)},
    )


def _route_and_align(logits: Tensor, k: int, block_size: int) -> Tensor:
    _, ids = echokernels.topk_softmax(logits, k)
    return echokernels.moe_align(ids, logits.shape[1], block_size)[0]


def _by_expert(inputs: Inputs) -> Callable[[Outputs], float]:
    """The share of places that hold a choice of another expert than they should. Within an expert
    not all libraries keep choices in order, and behind the last block there may be anything."""
    logits, k, _ = inputs
    owners = torch.cat((formulas.topk_softmax(logits, k)[1].flatten(), logits.new_tensor([-1])))
    expected = formulas.route_and_align(*inputs)

    def error(outputs: Outputs) -> float:
        [sorted_ids] = as_tuple(outputs)
        sorted_ids = sorted_ids[: len(expected)].long()
        if not torch.equal(sorted_ids.sort().values, expected.sort().values):
            return float("inf")
        return float((owners[sorted_ids] != owners[expected]).float().mean())

    return error


def _choices(s: Suite, device: torch.device, tokens: int) -> Tensor:
    return torch.rand(tokens, s.experts, device=device).argsort(1)[:, : s.chosen].int()


def _permute(s: Suite, tokens: int) -> Case:
    def make(device: torch.device) -> Inputs:
        return randn(device, tokens, s.expert_hidden), _choices(s, device, tokens), s.experts

    return Case(
        "moe_permute",
        f"T{tokens}_E{s.experts}_k{s.chosen}",
        make=make,
        run=lambda x, ids, count: echokernels.moe_permute(x, ids, count)[0],
        check=against(formulas.moe_permute),
        tolerance=EXACT,
        num_bytes=tokens * s.expert_hidden * BF16 * (1 + s.chosen),
        ceiling="copy",
        peers=formula_peers(formulas.moe_permute, ()),
    )


def _unpermute(s: Suite, tokens: int) -> Case:
    def make(device: torch.device) -> Inputs:
        permuted = randn(device, tokens * s.chosen, s.expert_hidden)
        rows = torch.randperm(len(permuted), device=device).int().view(tokens, s.chosen)
        return permuted, rows, torch.rand(tokens, s.chosen, device=device)

    return Case(
        "moe_unpermute",
        f"T{tokens}_E{s.experts}_k{s.chosen}",
        make=make,
        run=echokernels.moe_unpermute,
        check=against(formulas.moe_unpermute),
        tolerance=ROUNDED,
        num_bytes=tokens * s.expert_hidden * BF16 * (1 + s.chosen),
        ceiling="copy",
        peers=formula_peers(formulas.moe_unpermute, s.compile_modes),
    )
