"""fused_moe against float64, token by token and expert by expert."""

from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echokernels import fused_moe, fused_moe_workspace_size, topk_softmax
from echokernels._path import forced_path
from echokernels._replay import bypass
from echokernels._tuning import TileConfig, forced
from echokernels.moe import fused_moe as fused_moe_module
from tests.ops.moe_routes import as_tensor, routes, small_chunks  # noqa: F401
from tests.ops.test_gate_up import ACTIVATIONS
from tests.ops.test_grouped_gemm import dtypes
from tests.strategies import generator, poisoned, randn, seeds, strided_randn
from tests.tolerances import assert_close

HIDDEN, WIDTH = 40, 24
# Of what is between the products an element near the border of two numbers is off by an ulp; the
# second product, of many choices; the sum.
ROUNDINGS = 4


@contextmanager
def choices_taken(path):
    """As they come ("direct"), in the order of their experts ("ordered"), or as the op decides
    ("auto")."""
    if path == "auto":
        yield
        return
    with (
        bypass(),
        mock.patch.object(fused_moe_module, "_takes_direct", return_value=path == "direct"),
    ):
        yield


def expected(x, w1, w2, weights, ids, activation, start):
    """In float64, with what is between an expert's products rounded to x's dtype."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token, row in enumerate(ids):
        for j, expert in enumerate(row):
            if not 0 <= expert - start < len(w1):
                continue
            gate, up = (w1[expert - start].double() @ x[token].double()).chunk(2)
            between = (ACTIVATIONS[activation](gate) * up).to(x.dtype).double()
            out[token] += weights[token, j].double() * (w2[expert - start].double() @ between)
    return out


def layer(num_experts, dtype, device, gen, hidden=HIDDEN, width=WIDTH):
    """(w1, w2): slices of wider weights."""
    make = {"dtype": dtype, "device": device, "gen": gen, "pad": 8}
    w1 = strided_randn(num_experts, 2 * width, hidden, **make, scale=hidden**-0.5)
    return w1, strided_randn(num_experts, hidden, width, **make, scale=width**-0.5)


@given(
    route=routes(most_experts=60),
    dtype=dtypes,
    id_dtype=st.sampled_from([torch.int32, torch.int64]),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
    pad=st.sampled_from([0, 8]),
    with_workspace=st.booleans(),
    path=st.sampled_from(["auto", "direct", "ordered"]),
    seed=seeds,
)
def test_fused_moe(device, route, dtype, id_dtype, activation, pad, with_workspace, path, seed):
    ids, k, num_experts, start = route
    gen = generator(seed)
    x = strided_randn(len(ids), HIDDEN, dtype=dtype, device=device, gen=gen, pad=pad)
    w1, w2 = layer(num_experts, dtype, device, gen)
    weights = (torch.rand(len(ids), k, generator=gen) + 0.5).to(device)
    workspace = None
    if with_workspace:
        size = fused_moe_workspace_size(len(ids), k, HIDDEN, WIDTH, num_experts, dtype)
        workspace = torch.full((size,), 255, dtype=torch.uint8, device=device)  # NaN in any dtype
    out = poisoned(len(ids), HIDDEN + pad, dtype=dtype, device=device)[:, :HIDDEN]
    with choices_taken(path):
        got = fused_moe(
            x, w1, w2, weights, as_tensor(ids, k, id_dtype, device, pad), activation=activation,
            expert_start=start, workspace=workspace, out=out,
        )  # fmt: skip
    assert got is out
    want = expected(x, w1, w2, weights, ids, activation, start)
    assert_close(out, want, roundings=ROUNDINGS)


@given(
    # hidden, width: less than a tile, several of them
    shape=st.sampled_from([(1, 1), (40, 24), (70, 33)]),
    k=st.sampled_from([1, 2, 3, 8]),
    dtype=dtypes,
    first=st.sampled_from([None, TileConfig(2, 16, 1), TileConfig(4, 32, 2, 3)]),
    second=st.sampled_from([None, TileConfig(2, 16, 1), TileConfig(4, 32, 2, 3)]),
    seed=seeds,
)
def test_choices_as_they_come(device, shape, k, dtype, first, second, seed):
    (hidden, width), gen = shape, generator(seed)
    x = randn(2, hidden, dtype=dtype, device=device, gen=gen)
    w1, w2 = layer(10, dtype, device, gen, hidden, width)
    weights = (torch.rand(2, k, generator=gen) + 0.5).to(device)
    # Of 14 experts the middle 10 are here.
    ids = torch.rand(2, 14, generator=gen).argsort(1)[:, :k].int()
    tiles = {"moe_gate_up": first, "moe_down": second}
    with ExitStack() as stack:
        stack.enter_context(choices_taken("direct"))
        for op, tile in tiles.items():
            if tile is not None:
                stack.enter_context(forced(op, tile))
        got = fused_moe(x, w1, w2, weights, ids.to(device), expert_start=2)
    want = expected(x, w1, w2, weights, ids.tolist(), "silu", 2)
    assert_close(got, want, roundings=ROUNDINGS)


@pytest.mark.parametrize(
    ("tokens", "k", "experts", "direct"),
    [(1, 2, 8, True), (2, 2, 8, False), (4, 8, 128, True), (5, 8, 128, False)],
)
def test_a_few_choices_are_taken_as_they_come(tokens, k, experts, direct):
    assert fused_moe_module._takes_direct(tokens, k, experts) == direct


def test_ranks_of_experts_add_up(device):
    gen = generator(0)
    x = randn(50, HIDDEN, dtype=torch.float32, device=device, gen=gen)
    w1, w2 = layer(32, torch.float32, device, gen)
    weights, ids = topk_softmax(randn(50, 32, dtype=torch.float32, device=device, gen=gen), 4)
    parts = [
        fused_moe(x, w1[i : i + 8], w2[i : i + 8], weights, ids, expert_start=i)
        for i in range(0, 32, 8)
    ]
    whole = fused_moe(x, w1, w2, weights, ids)
    assert_close(sum(parts), whole.double(), roundings=16)


def test_a_token_does_not_depend_on_the_batch(device):
    gen = generator(0)
    x = randn(33, HIDDEN, dtype=torch.float32, device=device, gen=gen)
    w1, w2 = layer(8, torch.float32, device, gen)
    weights, ids = topk_softmax(randn(33, 8, dtype=torch.float32, device=device, gen=gen), 2)
    whole = fused_moe(x, w1, w2, weights, ids)
    alone = torch.cat(
        [fused_moe(x[i : i + 1], w1, w2, weights[i : i + 1], ids[i : i + 1]) for i in (0, 7, 32)]
    )
    assert_close(alone, whole[[0, 7, 32]].double(), roundings=16)
    assert torch.equal(fused_moe(x, w1, w2, weights, ids), whole)


def arguments(device="cpu", tokens=3):
    ids = torch.tensor([[0, 3]] * tokens, device=device)
    x = torch.zeros(tokens, HIDDEN, device=device)
    w1 = torch.zeros(4, 2 * WIDTH, HIDDEN, device=device)
    w2 = torch.zeros(4, HIDDEN, WIDTH, device=device)
    return x, w1, w2, torch.ones(tokens, 2, device=device), ids


def test_a_workspace_that_does_not_fit_is_refused():
    need = fused_moe_workspace_size(3, 2, HIDDEN, WIDTH, 4, torch.float32)
    fused_moe(*arguments(), workspace=torch.empty(need, dtype=torch.uint8))
    with pytest.raises(ValueError, match=rf"workspace has {need - 1} bytes, must have at least"):
        fused_moe(*arguments(), workspace=torch.empty(need - 1, dtype=torch.uint8))
    with pytest.raises(ValueError, match="workspace begins at byte 1 of its storage"):
        fused_moe(*arguments(), workspace=torch.empty(need + 1, dtype=torch.uint8)[1:])
    with pytest.raises(ValueError, match=r"workspace\.stride\(\) is \(2,\), must be contiguous"):
        fused_moe(*arguments(), workspace=torch.empty(2 * need, dtype=torch.uint8)[::2])


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({1: torch.zeros(4, 40, HIDDEN)}, r"w1\.shape is \(4, 40, 40\), must be \(4, 48, 40\)"),
        ({2: torch.zeros(4, 41, WIDTH)}, r"x\.shape is \(3, 40\), must be \(\*, 41\)"),
        ({3: torch.ones(3, 3)}, r"weights\.shape is \(3, 3\), must be \(3, 2\)"),
        ({4: torch.zeros(4, 2).int()}, r"ids\.shape is \(4, 2\), must be \(3, \*\)"),
    ],
)
def test_shapes_that_are_refused(change, error):
    args = [change.get(i, value) for i, value in enumerate(arguments())]
    with pytest.raises(ValueError, match=error):
        fused_moe(*args)


def test_values_that_are_refused():
    with pytest.raises(ValueError, match="activation is 'none', must be 'silu'"):
        fused_moe(*arguments(), activation="none")
    with pytest.raises(ValueError, match="expert_start is -1, must be at least 0"):
        fused_moe(*arguments(), expert_start=-1)
    with pytest.raises(ValueError, match="k is 0, must be from 1 to 16"):
        fused_moe_workspace_size(3, 0, 8, 8, 4)


@pytest.mark.gpu
@given(
    route=routes(most_experts=60),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    shape=st.sampled_from([(HIDDEN, WIDTH), (136, 264)]),
    activation=st.sampled_from(["silu", "gelu"]),
    seed=seeds,
)
def test_the_kernels_for_many_tokens(cuda, route, dtype, shape, activation, seed):
    ids, k, num_experts, start = route
    gen = generator(seed)
    x = randn(len(ids), shape[0], dtype=dtype, device=cuda, gen=gen)
    w1, w2 = layer(num_experts, dtype, cuda, gen, *shape)
    weights = randn(len(ids), k, dtype=torch.float32, device=cuda, gen=gen)
    with forced_path("hopper"):
        out = fused_moe(
            x, w1, w2, weights, as_tensor(ids, k, torch.int32, cuda), activation=activation,
            expert_start=start,
        )  # fmt: skip
    assert_close(out, expected(x, w1, w2, weights, ids, activation, start), roundings=ROUNDINGS)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "k", "experts", "hidden", "width"), [(1, 8, 128, 2048, 768), (3, 2, 40, 4096, 1408)]
)
def test_few_choices(cuda, tokens, k, experts, hidden, width):
    """Of real sizes, one call behind the other, each with other choices."""
    gen = generator(0)
    w1, w2 = layer(experts, torch.bfloat16, cuda, gen, hidden, width)
    calls = []
    for _ in range(20):
        x = randn(tokens, hidden, dtype=torch.bfloat16, device=cuda, gen=gen)
        weights, ids = (y.to(cuda) for y in torch.rand(tokens, experts, generator=gen).topk(k))
        calls.append((x, w1, w2, weights, ids))
    results = [fused_moe(*call) for call in calls]
    for (x, _, _, weights, ids), got in zip(calls, results, strict=True):
        want = expected(x, w1, w2, weights, ids.tolist(), "silu", 0)
        assert_close(got, want, roundings=ROUNDINGS)


@pytest.mark.gpu
@pytest.mark.parametrize("skew", [0.0, 1.0, 50.0])
def test_many_tokens(cuda, skew):
    """Enough rows of each expert for the kernels that are made for them, in calls that are
    replayed."""
    gen = generator(0)
    x = randn(600, 256, dtype=torch.bfloat16, device=cuda, gen=gen)
    w1, w2 = layer(8, torch.bfloat16, cuda, gen, 256, 264)
    scores = torch.rand(600, 8, generator=gen) - skew * torch.arange(8)
    weights, ids = (y.to(cuda) for y in scores.softmax(1).topk(2))
    want = expected(x, w1, w2, weights, ids, "silu", 0)
    for _ in range(3):
        assert_close(fused_moe(x, w1, w2, weights, ids.int()), want, roundings=ROUNDINGS)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 700])
def test_one_graph_serves_any_load(cuda, tokens):
    gen = generator(0)
    x = randn(tokens, HIDDEN, dtype=torch.bfloat16, device=cuda, gen=gen)
    w1, w2 = layer(16, torch.bfloat16, cuda, gen)
    weights = torch.rand(tokens, 4, generator=gen).to(cuda)
    ids = torch.zeros(tokens, 4, dtype=torch.int32, device=cuda)
    size = fused_moe_workspace_size(tokens, 4, HIDDEN, WIDTH, 16)
    workspace = torch.empty(size, dtype=torch.uint8, device=cuda)
    out = torch.empty_like(x)
    fused_moe(x, w1, w2, weights, ids, workspace=workspace, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fused_moe(x, w1, w2, weights, ids, workspace=workspace, out=out)
    for skew in (0.0, 1.0, 50.0):
        scores = torch.rand(tokens, 16, generator=gen) - skew * torch.arange(16)
        ids.copy_(scores.argsort(1, descending=True)[:, :4])
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, fused_moe(x, w1, w2, weights, ids))
