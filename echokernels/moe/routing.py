"""Routing: the experts that a token goes to, and how much each of them counts.

    topk_softmax   scores = softmax(logits);  the k largest logits
    grouped_topk   scores = sigmoid(logits) or softmax(logits);  choice = scores + bias
                   the topk_groups best of num_groups groups of neighbours, by their largest choice,
                   with a bias by the sum of their two largest; of these the k largest choices
    weights        scores of the chosen experts; renormalised: divided by their sum; then, in
                   grouped_topk, times scaling_factor

topk_softmax is the router of Mixtral and Qwen (Shazeer et al., 2017), grouped_topk that of DeepSeek
(DeepSeek-AI, 2024; with a bias in place of an auxiliary loss in V3). All is in fp32. Of equal ones
the lower id comes first, among groups too. A logit of NaN counts as -inf and +inf as the largest
finite number, so ids are always distinct and in range, and weights finite: where all logits are
-inf, experts are equal.

logits: [tokens, experts], bias: [experts]; weights: fp32 [tokens, k] and ids: [tokens, k], both
mutated, in descending order.
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
from echokernels._tuning import TileConfig, select
from echokernels.moe import reference
from echokernels.sampling._keys import key_of
from echokernels.sampling._row import MAX_FLOAT, below, clean

MAX_EXPERTS = 512
MAX_CHOSEN = 16
_LOG2_E = tl.constexpr(1.4426950408889634)
# Of the keys by which experts are chosen: below that of -inf.
_TAKEN = tl.constexpr(-(2**31))
_NOBODY = tl.constexpr(2**31 - 1)


@triton.jit(do_not_specialize=["num_tokens"])
def _routing_kernel(
    weights_ptr,  # f32 [num_tokens, K]
    ids_ptr,  # int [num_tokens, K]
    logits_ptr,  # [num_tokens, GROUPS * group_size]
    bias_ptr,  # [GROUPS * group_size], unused without HAS_BIAS
    num_tokens,
    group_size,
    weights_stride,
    ids_stride,
    logits_stride,
    scaling_factor,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BY_LOGIT: tl.constexpr,  # experts are chosen; else by their score and bias
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,  # GROUPS
    BLOCK_S: tl.constexpr,  # group_size
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    group = tl.arange(0, BLOCK_G)[None, :, None]
    member = tl.arange(0, BLOCK_S)[None, None, :]
    exists = (group < GROUPS) & (member < group_size)
    expert = group * group_size + member
    mask = exists & (token < num_tokens)[:, None, None]

    wait_for_previous(PDL)
    rows = logits_ptr + (token * logits_stride)[:, None, None]
    logits = clean(tl.load(rows + expert, mask=mask, other=float("-inf")))
    let_next_start(PDL)
    scores = _sigmoid(logits) if SIGMOID else _softmax(logits, exists)
    choice = logits
    if not BY_LOGIT:
        choice = scores
        if HAS_BIAS:
            bias = tl.load(bias_ptr + expert, mask=exists, other=0.0).to(tl.float32)
            choice = clean(scores + bias)
        choice = tl.maximum(choice, -MAX_FLOAT)
    key = tl.where(exists, key_of(choice, 0), _TAKEN)
    if TOPK_GROUPS < GROUPS:
        kept = _kept_groups(choice, exists, group_size, TOPK_GROUPS, HAS_BIAS)
        key = tl.where(kept, key, _TAKEN)

    place = tl.arange(0, BLOCK_K)[None, :]
    chosen = tl.zeros([BLOCK_M, BLOCK_K], tl.int32)
    weights = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for i in tl.static_range(K):
        best = _of_row(tl.max(tl.max(key, 2), 1))
        winner = tl.min(tl.min(tl.where(key == best, expert, _NOBODY), 2), 1)
        is_winner = expert == _of_row(winner)
        score = tl.sum(tl.sum(tl.where(is_winner, scores, 0.0), 2), 1)
        key = tl.where(is_winner, _TAKEN, key)
        chosen = tl.where(place == i, winner[:, None], chosen)
        weights = tl.where(place == i, score[:, None], weights)
    if RENORMALIZE:
        total = tl.sum(weights, 1)[:, None]
        weights = tl.where(total > 0, weights / total, 1.0 / K)
    weights *= scaling_factor

    mask = (token < num_tokens)[:, None] & (place < K)
    out = (token * weights_stride)[:, None] + place
    tl.store(weights_ptr + out, weights, mask=mask)
    out = (token * ids_stride)[:, None] + place
    tl.store(ids_ptr + out, chosen.to(ids_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(-x * _LOG2_E))


@triton.jit
def _softmax(x, exists):
    """Over each row; of equal shares where all are -inf."""
    peak = _of_row(tl.max(tl.max(x, 2), 1))
    exponentials = tl.exp2(below(x, peak) * _LOG2_E)
    exponentials = tl.where(exists, exponentials, 0.0)
    return exponentials / _of_row(tl.sum(tl.sum(exponentials, 2), 1))


@triton.jit
def _kept_groups(choice, exists, group_size, TOPK_GROUPS: tl.constexpr, SUM_OF_TWO: tl.constexpr):
    """[rows, groups, 1]: whether a group is among the best."""
    choice = tl.where(exists, choice, float("-inf"))
    best = tl.max(choice, 2)
    if SUM_OF_TWO:
        member = tl.arange(0, choice.shape[2])[None, None, :]
        first = tl.min(tl.where(choice == best[:, :, None], member, _NOBODY), 2)
        second = tl.max(tl.where(member == first[:, :, None], float("-inf"), choice), 2)
        best += tl.where(group_size > 1, second, 0.0)
    group = tl.arange(0, choice.shape[1])[None, :]
    group_exists = tl.max(exists.to(tl.int32), 2) > 0
    key = tl.where(group_exists, key_of(best, 0), _TAKEN)
    kept = group < 0
    for _ in tl.static_range(TOPK_GROUPS):
        top = tl.max(key, 1)[:, None]
        winner = tl.min(tl.where(key == top, group, _NOBODY), 1)[:, None]
        kept = kept | (group == winner)
        key = tl.where(group == winner, _TAKEN, key)
    return kept[:, :, None]


@triton.jit
def _of_row(x):
    """[rows] to go with [rows, groups, members]."""
    return x[:, None, None]


def _config(num_tokens: int) -> TileConfig:
    """block_m: tokens. A warp for each of them; with few tokens a program too, to use all SMs."""
    rows = 4 if num_tokens > 1024 else 1
    return TileConfig(block_m=rows, block_n=1, num_warps=rows)


def _check_outputs(weights: torch.Tensor, ids: torch.Tensor, logits: torch.Tensor) -> None:
    check_dim("logits", logits, 2)
    check_dtype("logits", logits, FLOATS)
    check_last_contiguous("logits", logits)
    num_tokens, experts = logits.shape
    if not 1 <= experts <= MAX_EXPERTS:
        raise ValueError(f"logits.shape is {tuple(logits.shape)}, must have 1 to 512 experts")
    check_shape("weights", weights, num_tokens, None)
    check_dtype("weights", weights, (torch.float32,))
    check_last_contiguous("weights", weights)
    most = min(experts, MAX_CHOSEN)
    if not 1 <= weights.shape[1] <= most:
        raise ValueError(f"weights.shape is {tuple(weights.shape)}, must have 1 to {most} columns")
    check_shape("ids", ids, *weights.shape)
    check_dtype("ids", ids, INDEX)
    check_last_contiguous("ids", ids)
    check_same_device("logits", logits, weights=weights, ids=ids)


def _check_topk_softmax(
    weights: torch.Tensor,
    ids: torch.Tensor,
    logits: torch.Tensor,
    renormalize: bool,  # noqa: ARG001
) -> None:
    _check_outputs(weights, ids, logits)


def _check_grouped_topk(
    weights: torch.Tensor,
    ids: torch.Tensor,
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    num_groups: int,
    topk_groups: int,
    sigmoid: bool,  # noqa: ARG001
    renormalize: bool,  # noqa: ARG001
    scaling_factor: float,  # noqa: ARG001
) -> None:
    _check_outputs(weights, ids, logits)
    experts = logits.shape[1]
    if num_groups < 1 or experts % num_groups:
        raise ValueError(f"num_groups is {num_groups}, must divide the {experts} experts")
    check_range("topk_groups", topk_groups, 1, num_groups)
    most = topk_groups * (experts // num_groups)
    if weights.shape[1] > most:
        raise ValueError(
            f"weights.shape is {tuple(weights.shape)}, must have at most {most} columns: as many "
            "experts are in the groups that are kept"
        )
    if bias is not None:
        check_shape("bias", bias, experts)
        check_dtype("bias", bias, FLOATS)
        check_last_contiguous("bias", bias)
        check_same_device("logits", logits, bias=bias)


def _launch(
    weights: torch.Tensor,
    ids: torch.Tensor,
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    num_groups: int,
    topk_groups: int,
    sigmoid: bool,
    renormalize: bool,
    scaling_factor: float,
    by_logit: bool,
) -> None:
    num_tokens, experts = logits.shape
    config = select("routing", num_tokens, lambda: _config(num_tokens))
    launch(
        _routing_kernel,
        (triton.cdiv(num_tokens, config.block_m),),
        weights,
        ids,
        logits,
        logits if bias is None else bias,
        num_tokens,
        experts // num_groups,
        weights.stride(0),
        ids.stride(0),
        logits.stride(0),
        scaling_factor,
        K=ids.shape[1],
        GROUPS=num_groups,
        TOPK_GROUPS=topk_groups,
        SIGMOID=sigmoid,
        RENORMALIZE=renormalize,
        HAS_BIAS=bias is not None,
        BY_LOGIT=by_logit,
        BLOCK_M=config.block_m,
        BLOCK_G=triton.next_power_of_2(num_groups),
        BLOCK_S=triton.next_power_of_2(experts // num_groups),
        BLOCK_K=triton.next_power_of_2(ids.shape[1]),
        num_warps=config.num_warps,
        **early_launch(logits.device),
    )


def _launch_topk_softmax(
    weights: torch.Tensor, ids: torch.Tensor, logits: torch.Tensor, renormalize: bool
) -> None:
    _launch(weights, ids, logits, None, 1, 1, False, renormalize, 1.0, by_logit=True)


def _launch_grouped_topk(
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
    _launch(
        weights, ids, logits, bias, num_groups, topk_groups, sigmoid, renormalize, scaling_factor,
        by_logit=False,
    )  # fmt: skip


_topk_softmax = define_op(
    "topk_softmax(Tensor(a!) weights, Tensor(b!) ids, Tensor logits, bool renormalize) -> ()",
    check=_check_topk_softmax,
    triton=_launch_topk_softmax,
    reference=reference.topk_softmax,
)
_grouped_topk = define_op(
    "grouped_topk(Tensor(a!) weights, Tensor(b!) ids, Tensor logits, Tensor? bias, int num_groups, "
    "int topk_groups, bool sigmoid, bool renormalize, float scaling_factor) -> ()",
    check=_check_grouped_topk,
    triton=_launch_grouped_topk,
    reference=reference.grouped_topk,
)


def topk_softmax(
    logits: torch.Tensor,
    k: int,
    *,
    renormalize: bool = True,
    weights: torch.Tensor | None = None,
    ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights, ids) of the k experts with the largest logits, and their softmax over all experts.

    logits: [tokens, experts], at most 512 experts; strided rows are taken as they are.
    k: 1 to 16.
    renormalize: divide the weights of a token by their sum.
    weights, ids: where the results go, fp32 and int32 or int64 [tokens, k]; new ones by default.

    Of equal logits the lower id comes first. NaN counts as -inf, +inf as the largest finite number.

    Raises:
        TypeError, ValueError: A dtype, shape, stride or device does not fit.
    """
    weights, ids = _outputs(logits, k, weights, ids)
    _topk_softmax(weights, ids, logits, renormalize)
    return weights, ids


def grouped_topk(
    logits: torch.Tensor,
    k: int,
    *,
    num_groups: int = 1,
    topk_groups: int = 1,
    bias: torch.Tensor | None = None,
    sigmoid: bool = True,
    renormalize: bool = True,
    scaling_factor: float = 1.0,
    weights: torch.Tensor | None = None,
    ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights, ids) of k experts from the best groups, as DeepSeek's routers choose them.

    logits: [tokens, experts], at most 512 experts; num_groups: divides them, neighbours together.
    topk_groups: groups that a token may use.
    bias: [experts], added to the scores for the choice only.
    sigmoid: scores are sigmoids of logits, else their softmax.
    renormalize: divide the weights of a token by their sum; by a sum of 0, make them equal.
    scaling_factor: multiplies the weights at last.
    k, weights, ids: as in `topk_softmax`.

    Raises:
        TypeError, ValueError: A dtype, shape, stride or device does not fit; groups that do not
            divide the experts; more experts asked for than the kept groups have.
    """
    weights, ids = _outputs(logits, k, weights, ids)
    _grouped_topk(
        weights, ids, logits, bias, num_groups, topk_groups, sigmoid, renormalize, scaling_factor
    )
    return weights, ids


def _outputs(
    logits: torch.Tensor, k: int, weights: torch.Tensor | None, ids: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    check_range("k", k, 1, MAX_CHOSEN)
    shape = logits.shape[0], k
    for name, given in (("weights", weights), ("ids", ids)):
        if given is not None:
            check_shape(name, given, *shape)
    if weights is None:
        weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    if ids is None:
        ids = torch.empty(shape, dtype=torch.int32, device=logits.device)
    return weights, ids
