"""moe_align, moe_permute and moe_unpermute against orders found in plain Python."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echokernels import moe_align, moe_permute, moe_unpermute
from echokernels.moe import _order
from echokernels.moe.permute import moe_align_capacity
from tests.ops.moe_routes import as_tensor, in_order, routes, small_chunks  # noqa: F401
from tests.strategies import dtypes, generator, poisoned, randn, seeds, strided_randn
from tests.tolerances import assert_close

id_dtypes = st.sampled_from([torch.int32, torch.int64])


@given(
    route=routes(),
    id_dtype=id_dtypes,
    block_size=st.sampled_from([1, 7, 16, 128]),
    pad=st.sampled_from([0, 3]),
    extra=st.sampled_from([0, 2]),
)
def test_moe_align(device, route, id_dtype, block_size, pad, extra):
    ids, k, num_experts, start = route
    num_ids = len(ids) * k
    blocks = moe_align_capacity(num_ids, num_experts, block_size) // block_size + extra
    sorted_ids, block_experts, num_padded = (
        poisoned(n, dtype=torch.int32, device=device) for n in (blocks * block_size, blocks, 1)
    )
    torch.ops.echo.moe_align(
        sorted_ids, block_experts, num_padded, as_tensor(ids, k, id_dtype, device, pad),
        num_experts, block_size, start,
    )  # fmt: skip
    want, owners = [], []
    for expert, choices in enumerate(in_order(ids, num_experts, start)):
        of_expert = -(-len(choices) // block_size)
        want += choices + [num_ids] * (of_expert * block_size - len(choices))
        owners += [expert] * of_expert
    assert num_padded.tolist() == [len(want)]
    assert sorted_ids.tolist() == want + [num_ids] * (len(sorted_ids) - len(want))
    assert block_experts.tolist() == owners + [-1] * (blocks - len(owners))


@given(route=routes(), block_size=st.sampled_from([1, 16, 64]))
def test_there_is_room_for_any_route(route, block_size):
    ids, k, num_experts, start = route
    choices = in_order(ids, num_experts, start)
    needed = sum(-(-len(c) // block_size) * block_size for c in choices)
    assert needed <= moe_align_capacity(len(ids) * k, num_experts, block_size)


def test_moe_align_makes_its_outputs(device):
    ids = torch.tensor([[3, 1], [1, 0]], dtype=torch.int64, device=device)
    sorted_ids, block_experts, num_padded = moe_align(ids, 2, 4, expert_start=1)
    assert sorted_ids.tolist() == [1, 2, 4, 4, 4, 4, 4, 4]
    assert block_experts.tolist() == [0, -1]
    assert num_padded.tolist() == [4]


@pytest.mark.parametrize(("num_ids", "experts", "block_size"), [(9, 4, 4), (3, 8, 16), (20, 2, 1)])
def test_no_more_room_than_the_worst_route_takes(num_ids, experts, block_size):
    most = max(
        sum(-(-n // block_size) * block_size for n in counts)
        for counts in partitions(num_ids, experts)
    )
    assert moe_align_capacity(num_ids, experts, block_size) == most


def partitions(total, parts):
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in partitions(total - first, parts - 1):
            yield (first, *rest)


@given(
    route=routes(),
    width=st.sampled_from([0, 1, 40, 1030]),
    dtype=dtypes,
    id_dtype=id_dtypes,
    pad=st.sampled_from([0, 8]),
    seed=seeds,
)
def test_moe_permute(device, route, width, dtype, id_dtype, pad, seed):
    ids, k, num_experts, start = route
    x = strided_randn(len(ids), width, dtype=dtype, device=device, gen=generator(seed), pad=pad)
    permuted = poisoned(len(ids) * k, width, dtype=dtype, device=device)
    got, offsets, rows = moe_permute(
        x, as_tensor(ids, k, id_dtype, device, pad), num_experts, start, permuted=permuted
    )
    assert got is permuted
    choices = in_order(ids, num_experts, start)
    assert offsets.diff().tolist() == [len(c) for c in choices]
    assert offsets[0] == 0
    flat = [c for of_expert in choices for c in of_expert]
    want_rows = [-1] * (len(ids) * k)
    for row, choice in enumerate(flat):
        want_rows[choice] = row
    assert rows.flatten().tolist() == want_rows
    assert torch.equal(permuted[: len(flat)], x[[c // k for c in flat]])
    assert permuted[len(flat) :].isnan().all()


@given(
    route=routes(),
    width=st.sampled_from([1, 40, 1030]),
    dtype=dtypes,
    id_dtype=id_dtypes,
    pad=st.sampled_from([0, 8]),
    seed=seeds,
)
def test_moe_unpermute(device, route, width, dtype, id_dtype, pad, seed):
    ids, k, num_experts, start = route
    gen = generator(seed)
    rows = [-1] * (len(ids) * k)
    flat = [c for of_expert in in_order(ids, num_experts, start) for c in of_expert]
    for row, choice in enumerate(flat):
        rows[choice] = row
    permuted = strided_randn(len(ids) * k, width, dtype=dtype, device=device, gen=gen, pad=pad)
    permuted[len(flat) :] = float("nan")  # what nobody wrote
    weights = randn(len(ids), k, dtype=torch.float32, device=device, gen=gen)
    out = poisoned(len(ids), width + pad, dtype=dtype, device=device)[:, :width]
    source_rows = torch.tensor(rows, dtype=id_dtype, device=device).view(len(ids), k)
    assert moe_unpermute(permuted, source_rows, weights, out=out) is out
    want = torch.zeros(len(ids), width, dtype=torch.float64, device=device)
    for choice, row in enumerate(rows):
        if row >= 0:
            token, j = divmod(choice, k)
            want[token] += weights[token, j].double() * permuted[row].double()
    assert_close(out, want)


@given(route=routes(), dtype=dtypes, seed=seeds)
def test_there_and_back_is_the_identity(device, route, dtype, seed):
    ids, k, num_experts, start = route
    x = randn(len(ids), 40, dtype=dtype, device=device, gen=generator(seed))
    permuted, _, rows = moe_permute(x, as_tensor(ids, k, torch.int32, device), num_experts, start)
    first = torch.zeros(len(ids), k, device=device)
    first[:, 0] = 1.0
    here = (rows[:, 0] >= 0)[:, None]
    assert torch.equal(moe_unpermute(permuted, rows, first), x.where(here, 0.0))


def test_ranks_of_experts_add_up(device):
    """Expert parallelism: each of four ranks has 8 experts."""
    gen = generator(0)
    ids = torch.rand(50, 32, generator=gen).argsort(1)[:, :4].to(device)
    x = randn(50, 24, dtype=torch.float32, device=device, gen=gen)
    weights = torch.rand(50, 4, generator=gen).to(device)
    parts = []
    for start in (0, 8, 16, 24):
        permuted, _, rows = moe_permute(x, ids, 8, start)
        parts.append(moe_unpermute(permuted, rows, weights))
    permuted, _, rows = moe_permute(x, ids, 32)
    whole = moe_unpermute(permuted, rows, weights)
    assert_close(sum(parts), whole.double(), roundings=4)


def test_more_chunks_than_are_added_up_at_once(device):
    tokens = 9 * _order.CHUNK // 2 + 1
    ids = torch.arange(2 * tokens, device=device).view(tokens, 2) * 7 % 5
    _, offsets, rows = moe_permute(torch.zeros(tokens, 1, device=device), ids, 5)
    order = ids.flatten().argsort(stable=True)
    assert torch.equal(rows.flatten()[order], torch.arange(2 * tokens, device=device).int())
    assert torch.equal(offsets.diff().cpu(), ids.flatten().bincount().cpu().int())


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"block_size": 0}, "block_size is 0, must be at least 1"),
        ({"num_experts": 0}, "num_experts is 0, must be from 1 to 512"),
        ({"num_experts": 513}, "num_experts is 513, must be from 1 to 512"),
        ({"expert_start": -1}, "expert_start is -1, must be at least 0"),
        ({"ids": torch.zeros(3, 17, dtype=torch.int32)}, r"ids\.shape\[1\] is 17, must be from 1"),
        ({"ids": torch.zeros(3, dtype=torch.int32)}, r"ids has shape \(3,\), must have 2"),
    ],
)
def test_calls_that_are_refused(change, error):
    options = {"ids": torch.zeros(3, 2, dtype=torch.int32), "num_experts": 8, "block_size": 16}
    with pytest.raises(ValueError, match=error):
        moe_align(**(options | change))


def test_too_little_room_is_refused():
    ids = torch.zeros(3, 2, dtype=torch.int32)
    room = [torch.zeros(n, dtype=torch.int32) for n in (96, 6, 1)]
    torch.ops.echo.moe_align(*room, ids, 8, 16)
    with pytest.raises(ValueError, match=r"sorted_ids\.shape\[0\] is 95, must be at least 96"):
        torch.ops.echo.moe_align(room[0][:95], *room[1:], ids, 8, 16)
    with pytest.raises(ValueError, match=r"block_experts\.shape\[0\] is 5, must be at least 6"):
        torch.ops.echo.moe_align(room[0], room[1][:5], room[2], ids, 8, 16)


def test_tensors_that_do_not_fit_are_refused():
    x, ids = torch.zeros(3, 8), torch.zeros(3, 2, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"permuted\.dtype is float16, must be float32"):
        moe_permute(x, ids, 4, permuted=torch.zeros(6, 8).half())
    with pytest.raises(ValueError, match=r"ids\.shape is \(3, 2\), must be \(4, \*\)"):
        moe_permute(torch.zeros(4, 8), ids, 4)
    with pytest.raises(TypeError, match=r"weights\.dtype is float16, must be float32"):
        moe_unpermute(torch.zeros(6, 8), ids, torch.zeros(3, 2).half())
    with pytest.raises(ValueError, match=r"weights\.shape is \(3, 3\), must be \(3, 2\)"):
        moe_unpermute(torch.zeros(6, 8), ids, torch.zeros(3, 3))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [65_535, 65_536, 70_000])
def test_a22_many_tokens(cuda, tokens):
    gen = torch.Generator("cuda").manual_seed(0)
    ids = torch.rand(tokens, 8, generator=gen, device=cuda).argsort(1)[:, :2]
    x = torch.randn(tokens, 16, generator=gen, device=cuda)
    permuted, offsets, rows = moe_permute(x, ids, 8)
    order = ids.flatten().argsort(stable=True)
    assert torch.equal(permuted, x[order // 2])
    assert torch.equal(offsets.diff().long(), ids.flatten().bincount())
    half = torch.full((tokens, 2), 0.5, device=cuda)
    assert torch.equal(moe_unpermute(permuted, rows, half), x)


@pytest.mark.gpu
def test_orders_agree_from_run_to_run(cuda):
    ids = torch.rand(4096, 128, device=cuda).argsort(1)[:, :8]
    first = moe_align(ids, 128, 64)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, moe_align(ids, 128, 64), strict=True))
