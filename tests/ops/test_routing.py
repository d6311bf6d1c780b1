"""topk_softmax and grouped_topk against float64 oracles, their edges and their contract."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echokernels import grouped_topk, topk_softmax
from echokernels._tuning import TileConfig, forced
from echokernels.moe.routing import _config
from tests.ops import routing_oracle as oracle
from tests.strategies import dtypes, generator, poisoned, seeds, strided_randn, token_counts
from tests.tolerances import assert_close

INF, NAN = math.inf, math.nan
# NumPy warns in the interpreter where a logit is not finite.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
id_dtypes = st.sampled_from([torch.int32, torch.int64])
tiles = st.sampled_from([None, TileConfig(4, 1, 4)])


def results(tokens, k, id_dtype, device, pad):
    """Poisoned outputs (weights, ids) whose rows are `pad` apart."""
    weights = poisoned(tokens, k + pad, dtype=torch.float32, device=device)
    ids = poisoned(tokens, k + pad, dtype=id_dtype, device=device)
    return weights[:, :k], ids[:, :k]


@given(
    tokens=token_counts,
    experts_and_k=st.sampled_from(
        [(1, 1), (7, 3), (8, 2), (60, 4), (128, 8), (200, 16), (512, 10)]
    ),
    dtype=dtypes,
    id_dtype=id_dtypes,
    whole=st.booleans(),
    renormalize=st.booleans(),
    pad=st.sampled_from([0, 3]),
    tile=tiles,
    seed=seeds,
)
def test_topk_softmax(
    device, tokens, experts_and_k, dtype, id_dtype, whole, renormalize, pad, tile, seed
):
    experts, k = experts_and_k
    gen = generator(seed)
    logits = strided_randn(tokens, experts, dtype=dtype, device=device, gen=gen, pad=pad, scale=3)
    if whole:  # most tie
        logits.copy_(logits.round())
    weights, ids = results(tokens, k, id_dtype, device, pad)
    with forced("routing", tile or _config(tokens)):
        topk_softmax(logits, k, renormalize=renormalize, weights=weights, ids=ids)
    for row, row_ids, row_weights in zip(logits, ids, weights, strict=True):
        want, want_weights = oracle.topk_softmax(row.tolist(), k, renormalize)
        assert row_ids.tolist() == want
        assert_close(row_weights, torch.tensor(want_weights, dtype=torch.float64, device=device))
    for x in (weights, ids):
        if pad and tokens:
            gap = x.as_strided((tokens, k + pad), x.stride())[:, k:]
            assert torch.equal(
                gap.nan_to_num(9.0),
                poisoned(*gap.shape, dtype=x.dtype, device=device).nan_to_num(9.0),
            )


@given(
    tokens=token_counts,
    # experts, groups, groups kept, k
    shape=st.sampled_from(
        [(8, 1, 1, 2), (256, 8, 4, 8), (160, 8, 3, 6), (12, 4, 2, 5), (6, 6, 2, 2)]
    ),
    dtype=dtypes,
    id_dtype=id_dtypes,
    with_bias=st.booleans(),
    sigmoid=st.booleans(),
    renormalize=st.booleans(),
    scaling_factor=st.sampled_from([1.0, 2.5]),
    seed=seeds,
)
def test_grouped_topk(
    device, tokens, shape, dtype, id_dtype, with_bias, sigmoid, renormalize, scaling_factor, seed
):
    experts, num_groups, topk_groups, k = shape
    gen = generator(seed)
    logits = strided_randn(tokens, experts, dtype=dtype, device=device, gen=gen, pad=5)
    bias = None
    if with_bias:
        bias = strided_randn(experts, dtype=torch.float32, device=device, gen=gen, pad=0)
    weights, ids = results(tokens, k, id_dtype, device, 0)
    grouped_topk(
        logits, k, num_groups=num_groups, topk_groups=topk_groups, bias=bias, sigmoid=sigmoid,
        renormalize=renormalize, scaling_factor=scaling_factor, weights=weights, ids=ids,
    )  # fmt: skip
    size = experts // num_groups
    for row, row_ids, row_weights in zip(logits, ids.tolist(), weights, strict=True):
        scores, choice = oracle.grouped_scores(
            row.tolist(), None if bias is None else bias.tolist(), sigmoid
        )
        # Scores are rounded: what is as good as equal may come in any order.
        of_groups = oracle.group_scores(choice, num_groups, 2 if with_bias else 1)
        kept = {i // size for i in row_ids}
        assert len(kept) <= topk_groups
        least = sorted(of_groups, reverse=True)[topk_groups - 1]
        assert all(of_groups[g] >= least - 1e-6 for g in kept)
        assert len({*row_ids}) == k
        chosen = [choice[i] for i in row_ids]
        assert all(a >= b - 1e-6 for a, b in pairwise(chosen))
        sure = [g for g in range(num_groups) if of_groups[g] > least + 1e-6]
        others = [
            choice[i] for g in sure for i in range(g * size, (g + 1) * size) if i not in row_ids
        ]
        assert all(x <= chosen[-1] + 1e-6 for x in others)
        want = oracle.weigh([scores[i] for i in row_ids], renormalize, scaling_factor)
        assert_close(row_weights, torch.tensor(want, dtype=torch.float64, device=device))


def test_a18_rows_that_are_not_finite(device):
    gen = generator(0)
    logits = strided_randn(8, 128, dtype=torch.bfloat16, device=device, gen=gen, pad=0)
    clean_weights, clean_ids = topk_softmax(logits, 8)
    bad = logits.clone()
    bad[1], bad[3], bad[5] = NAN, INF, -INF
    bad[6, 17] = NAN
    for route in (topk_softmax, grouped_topk):
        weights, ids = route(bad, 8)
        assert weights.isfinite().all()
        assert ((ids >= 0) & (ids < 128)).all()
        assert all(len(set(row)) == 8 for row in ids.tolist())
    weights, ids = topk_softmax(bad, 8)
    good = [0, 2, 4, 7]
    assert torch.equal(weights[good], clean_weights[good])
    assert torch.equal(ids[good], clean_ids[good])
    for row in (1, 3, 5):
        assert ids[row].tolist() == list(range(8))
        assert weights[row].tolist() == [1 / 8] * 8
    assert 17 not in ids[6].tolist()


def test_where_no_logit_counts_the_experts_there_are_share(device):
    logits = torch.full((1, 7), -INF, device=device)
    weights, ids = topk_softmax(logits, 2, renormalize=False)
    assert ids.tolist() == [[0, 1]]
    assert_close(weights, torch.full((1, 2), 1 / 7, dtype=torch.float64, device=device))


@pytest.mark.parametrize("renormalize", [False, True])
def test_a19_ties_and_weights_that_are_not_renormalised(device, renormalize):
    logits = torch.tensor([[1.0, 2, 3, 0, 3, 3, -1, 0], [2.0] * 8], device=device)
    weights, ids = topk_softmax(logits, 2, renormalize=renormalize)
    assert ids.tolist() == [[2, 4], [0, 1]]
    total = sum(math.exp(x) for x in logits[0].tolist())
    want = [[math.exp(3) / total] * 2, [1 / 8] * 2]
    if renormalize:
        want = [[0.5, 0.5]] * 2
    assert_close(weights, torch.tensor(want, dtype=torch.float64, device=device))


def test_zeros_of_both_signs_tie(device):
    logits = torch.tensor([[-1.0, -0.0, 0.0, -0.0]], device=device)
    assert topk_softmax(logits, 3)[1].tolist() == [[1, 2, 3]]


def test_groups_that_tie(device):
    logits = torch.zeros(1, 12, device=device)
    _, ids = grouped_topk(logits, 5, num_groups=4, topk_groups=2)
    assert ids.tolist() == [[0, 1, 2, 3, 4]]


def test_a_group_counts_by_its_two_best_with_a_bias(device):
    """[.9, .1, .6, .6]: the second group is better by its two best, the first by its best."""
    bias = torch.zeros(4, device=device)
    logits = torch.tensor([[0.9, 0.1, 0.6, 0.6]], device=device).logit()
    options = {"num_groups": 2, "topk_groups": 1}
    assert grouped_topk(logits, 2, bias=bias, **options)[1].tolist() == [[2, 3]]
    assert grouped_topk(logits, 2, **options)[1].tolist() == [[0, 1]]


def test_the_bias_does_not_weigh(device):
    bias = torch.tensor([0.0, 0.0, 5.0], device=device)
    logits = torch.tensor([[1.0, 2.0, -3.0]], device=device)
    weights, ids = grouped_topk(logits, 2, bias=bias, renormalize=False)
    assert ids.tolist() == [[2, 1]]
    assert_close(weights, logits[:, [2, 1]].double().sigmoid())


def test_sigmoids_of_nothing_are_equal_shares(device):
    logits = torch.full((1, 4), -INF, device=device)
    weights, ids = grouped_topk(logits, 2)
    assert ids.tolist() == [[0, 1]]
    assert weights.tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize(
    ("route", "k", "error"),
    [
        (topk_softmax, 0, "k is 0, must be from 1 to 16"),
        (topk_softmax, 9, r"weights\.shape is \(3, 9\), must have 1 to 8 columns"),
        (grouped_topk, 17, "k is 17, must be from 1 to 16"),
    ],
)
def test_counts_that_are_refused(device, route, k, error):
    with pytest.raises(ValueError, match=error):
        route(torch.zeros(3, 8, device=device), k)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"num_groups": 3}, "num_groups is 3, must divide the 8 experts"),
        ({"num_groups": 0}, "num_groups is 0, must divide the 8 experts"),
        ({"num_groups": 4, "topk_groups": 5}, "topk_groups is 5, must be from 1 to 4"),
        ({"num_groups": 4, "topk_groups": 1}, "must have at most 2 columns"),
        ({"bias": torch.zeros(7)}, r"bias\.shape is \(7,\), must be \(8\)"),
    ],
)
def test_groups_that_are_refused(options, error):
    with pytest.raises(ValueError, match=error):
        grouped_topk(torch.zeros(3, 8), 3, **options)


def test_tensors_that_are_refused(device):
    logits = torch.zeros(3, 8, device=device)
    with pytest.raises(ValueError, match="must have 1 to 512 experts"):
        topk_softmax(torch.zeros(3, 513, device=device), 2)
    with pytest.raises(TypeError, match=r"weights\.dtype is float16, must be float32"):
        topk_softmax(logits, 2, weights=torch.zeros(3, 2, device=device).half())
    with pytest.raises(TypeError, match=r"ids\.dtype is int16, must be int32, int64"):
        topk_softmax(logits, 2, ids=torch.zeros(3, 2, device=device).short())
    with pytest.raises(ValueError, match=r"ids\.shape is \(3, 2\), must be \(3, 4\)"):
        topk_softmax(logits, 4, ids=torch.zeros(3, 2, device=device).int())
    with pytest.raises(ValueError, match=r"logits\.stride\(\) is"):
        topk_softmax(torch.zeros(8, 3, device=device).T, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [65_535, 65_536, 70_000])
def test_a22_many_tokens(cuda, tokens):
    logits = torch.randn(tokens, 16, generator=torch.Generator("cuda").manual_seed(0), device=cuda)
    weights, ids = topk_softmax(logits, 4)
    half = tokens // 2
    for part, at in ((logits[:half], slice(0, half)), (logits[half:], slice(half, None))):
        part_weights, part_ids = topk_softmax(part, 4)
        assert torch.equal(weights[at], part_weights)
        assert torch.equal(ids[at], part_ids)
