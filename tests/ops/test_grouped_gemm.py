"""grouped_gemm against float64, group by group."""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echokernels import grouped_gemm
from echokernels._path import forced_path
from echokernels._target import INTERPRETED, KNOWN_TARGETS, target_of
from echokernels._tuning import forced
from echokernels.moe._hopper_gemm import HopperTile, can_run
from echokernels.moe.grouped_gemm import GroupedTile, _config, _num_programs, launch_grouped_gemm
from tests.ops.test_gate_up import ACTIVATIONS
from tests.strategies import FLOAT_DTYPES, generator, poisoned, randn, seeds, strided_randn
from tests.tolerances import assert_close

# The interpreter truncates to bf16 where others round.
dtypes = st.sampled_from([d for d in FLOAT_DTYPES if not INTERPRETED or d != torch.bfloat16])
# Rows of each expert: none, even, skewed, all of one; rows before the first and after the last.
groups = st.sampled_from(
    [[0], [5], [0, 0, 0], [1, 1, 1, 1], [3, 0, 17, 1, 0], [0, 70, 0], [2] * 9, [33, 1, 0, 0, 40]]
)


def expected(x, weight, sizes, first, row_weights, activation):
    """Rows of the groups, in float64."""
    parts = []
    for of_expert, size in zip(weight.double(), sizes, strict=True):
        y = x[first : first + size].double() @ of_expert.T
        if activation != "none":
            gate, up = y.chunk(2, 1)
            y = ACTIVATIONS[activation](gate) * up
        if row_weights is not None:
            y *= row_weights[first : first + size, None].double()
        parts.append(y)
        first += size
    return torch.cat(parts)


@given(
    sizes=groups,
    first=st.sampled_from([0, 0, 3]),
    behind=st.sampled_from([0, 5]),
    # width, K
    shape=st.sampled_from([(1, 1), (24, 40), (70, 33), (130, 64)]),
    dtype=dtypes,
    id_dtype=st.sampled_from([torch.int32, torch.int64]),
    activation=st.sampled_from(["none", "silu", "gelu", "gelu_tanh"]),
    weighted=st.booleans(),
    pad=st.sampled_from([0, 8]),
    tile=st.sampled_from([None, GroupedTile(32, 32, 4, 2), GroupedTile(16, 32, 4, 1, 16, 1, 2)]),
    seed=seeds,
)
def test_grouped_gemm(
    device, sizes, first, behind, shape, dtype, id_dtype, activation, weighted, pad, tile, seed
):
    width, depth = shape
    gen = generator(seed)
    rows = first + sum(sizes) + behind
    make = {"dtype": dtype, "device": device, "gen": gen, "pad": pad}
    x = strided_randn(rows, depth, **make)
    x[:first] = x[rows - behind :] = float("nan")  # nobody's
    size = width if activation == "none" else 2 * width
    weight = strided_randn(len(sizes), size, depth, **make, scale=depth**-0.5)
    offsets = torch.tensor([first, *sizes], device=device).cumsum(0).to(id_dtype)
    row_weights = None
    if weighted:
        row_weights = randn(rows, dtype=torch.float32, device=device, gen=gen)
    out = poisoned(rows, width + pad, dtype=dtype, device=device)[:, :width]
    with nullcontext() if tile is None else forced("grouped_gemm", tile):
        got = grouped_gemm(
            x, weight, offsets, row_weights=row_weights, activation=activation, out=out
        )
    assert got is out
    want = expected(x, weight, sizes, first, row_weights, activation)
    assert_close(out[first : rows - behind], want)
    assert out[:first].isnan().all()
    assert out[rows - behind :].isnan().all()


# Of all experts; none, one, of tiles of 128 rows whole ones, just more and just less.
many_rows = st.sampled_from(
    [
        [300],
        [0, 0, 257],
        [128, 64, 65, 0, 1],
        [127, 129, 63, 0, 200],
        [3] * 70,
        [0] * 3,
        [5, 1000, 7],
    ]
)


# dtype, dtype of offsets, activation, weighted, choices of a token (0: rows of x stand in order).
# A few of all combinations, for each is a kernel to compile.
many_kinds = st.sampled_from(
    [
        (torch.bfloat16, torch.int32, "silu", False, 3),
        (torch.bfloat16, torch.int32, "none", False, 0),
        (torch.float16, torch.int64, "none", True, 0),
        (torch.float16, torch.int32, "gelu", True, 1),
        (torch.bfloat16, torch.int64, "gelu_tanh", True, 0),
        (torch.bfloat16, torch.int32, "none", True, 2),
    ]
)


@pytest.mark.gpu
@settings(max_examples=40)
@given(
    sizes=many_rows,
    first=st.sampled_from([0, 3, 70]),
    behind=st.sampled_from([0, 5, 150]),
    # width, K
    shape=st.sampled_from([(24, 40), (33, 8), (130, 64), (256, 200), (300, 512), (768, 1048)]),
    kind=many_kinds,
    pad=st.sampled_from([0, 8]),
    tile=st.sampled_from([None, None, HopperTile(128, 128, num_stages=3, group=1)]),
    seed=seeds,
)
def test_many_rows_on_hopper(cuda, sizes, first, behind, shape, kind, pad, tile, seed):
    if not target_of(cuda).runs_hopper_kernels:
        pytest.skip("not a Hopper GPU")
    (width, depth), (dtype, id_dtype, activation, weighted, k) = shape, kind
    gen = generator(seed)
    rows, end = first + sum(sizes) + behind, first + sum(sizes)
    make = {"dtype": dtype, "device": cuda, "gen": gen, "pad": pad}
    x = source = strided_randn(rows, depth, **make)
    choices = None
    if k:
        choices = torch.full((rows,), 2**30, dtype=torch.int32)  # nothing is there
        choices[first:end] = torch.randperm(end - first, generator=gen).int()
        x = strided_randn(sum(sizes) // k + 1, depth, **make)
        source[first:end] = x[choices[first:end].to(cuda).long() // k]
        choices = choices.to(cuda)
    source[:first] = source[end:] = float("nan")  # nobody's
    size = width if activation == "none" else 2 * width
    weight = strided_randn(len(sizes), size, depth, **make, scale=depth**-0.5)
    offsets = torch.tensor([first, *sizes], device=cuda).cumsum(0).to(id_dtype)
    row_weights = randn(rows, dtype=torch.float32, device=cuda, gen=gen) if weighted else None
    out = poisoned(rows, -(-width // 8) * 8 + pad, dtype=dtype, device=cuda)
    wide, out = out, out[:, :width]
    assert can_run(target_of(cuda), out, x, weight)
    with (
        forced_path("hopper"),
        nullcontext() if tile is None else forced("grouped_gemm_hopper", tile),
    ):
        launch_grouped_gemm(out, x, weight, offsets, row_weights, activation, choices, max(k, 1))
    if sum(sizes):
        want = expected(source, weight, sizes, first, row_weights, activation)
        assert_close(out[first:end], want)
    for untouched in (out[:first], out[end:], wide[:, width:]):
        assert untouched.isnan().all()


@pytest.mark.gpu
def test_many_rows_do_not_depend_on_the_run(cuda):
    """Deterministic, whatever warps of a program wait for."""
    gen = generator(0)
    make = {"dtype": torch.bfloat16, "device": cuda, "gen": gen}
    x, weight = randn(4000, 1024, **make), randn(16, 512, 1024, **make)
    offsets = torch.randint(4000, (15,), generator=gen).sort().values
    offsets = torch.cat((torch.tensor([0]), offsets, torch.tensor([4000]))).to(cuda)
    with forced_path("hopper"):
        results = [grouped_gemm(x, weight, offsets, activation="silu") for _ in range(20)]
    assert all(torch.equal(result, results[0]) for result in results)


def test_groups_are_as_they_would_be_alone(device):
    """Metamorphic: an expert's rows do not depend on the other experts' rows."""
    gen = generator(0)
    x = randn(40, 48, dtype=torch.float32, device=device, gen=gen)
    weight = randn(3, 32, 48, dtype=torch.float32, device=device, gen=gen)
    offsets = torch.tensor([0, 10, 10, 40], device=device)
    together = grouped_gemm(x, weight, offsets)
    alone = grouped_gemm(x, weight[2:], torch.tensor([10, 40], device=device))
    assert_close(together[10:], alone[10:].double(), roundings=4)


@pytest.mark.parametrize("name", KNOWN_TARGETS)
@pytest.mark.parametrize(
    ("rows", "experts"), [(1, 8), (8, 128), (512, 128), (32_768, 128), (7, 512)]
)
@pytest.mark.parametrize("width", [1, 768, 14_336])
def test_programs_follow_from_shapes(name, rows, experts, width):
    target = KNOWN_TARGETS[name]
    tile = _config(rows, experts, width, 2, target)
    columns = -(-width // tile.block_m)
    programs = _num_programs(rows, experts, columns, tile.block_t, tile.programs_per_sm, target)
    assert 1 <= programs <= 4 * target.num_sms
    # With every row an expert's own there are as many tiles as programs, or more.
    assert programs <= min(rows, experts) * columns + rows // tile.block_t * columns


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"activation": "relu"}, "activation is 'relu', must be 'none', 'silu'"),
        ({"weight": torch.zeros(2, 6, 9)}, r"weight\.shape is \(2, 6, 9\), must be \(\*, \*, 8\)"),
        ({"weight": torch.zeros(2, 5, 8), "activation": "silu"}, "must have an even second"),
        (
            {"expert_offsets": torch.zeros(2).int()},
            r"expert_offsets\.shape is \(2,\), must be \(3\)",
        ),
        ({"row_weights": torch.zeros(3)}, r"row_weights\.shape is \(3,\), must be \(4\)"),
        ({"out": torch.zeros(4, 5)}, r"out\.shape is \(4, 5\), must be \(4, 6\)"),
    ],
)
def test_calls_that_are_refused(change, error):
    options = {
        "x": torch.zeros(4, 8),
        "weight": torch.zeros(2, 6, 8),
        "expert_offsets": torch.zeros(3, dtype=torch.int32),
    }
    with pytest.raises(ValueError, match=error):
        grouped_gemm(**(options | change))


@pytest.mark.parametrize("offsets", [[0, 3, 2], [-1, 0, 4], [0, 2, 5]])
def test_offsets_are_checked_when_debugging(debug_checks, offsets):  # noqa: ARG001
    with pytest.raises(ValueError, match=r"expert_offsets is .*, must ascend from 0 to at most 4"):
        grouped_gemm(torch.zeros(4, 8), torch.zeros(2, 6, 8), torch.tensor(offsets))
