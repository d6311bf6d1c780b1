"""rotary_embedding against a float64 oracle."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echokernels._library import OPS
from echokernels.attention import reference
from echokernels.attention._rotary import heads_of
from echokernels.attention.rope import _config, rotary_embedding
from echokernels.attention.rope_table import rope_table
from tests.ops.rope_oracle import THETA, oracle
from tests.strategies import dtypes, generator, poisoned, randn, seeds, token_counts
from tests.tolerances import assert_close, assert_same_bits

MAX_POSITION = 4096


@given(
    tokens=token_counts,
    heads=st.sampled_from([(1, None), (4, 2), (9, 3), (2, 5)]),
    # Whole heads; partial; an odd head; halves that are no power of two.
    dims=st.sampled_from([(64, 64), (80, 32), (7, 6), (96, 96), (40, 2)]),
    dtype=dtypes,
    index=st.sampled_from([torch.int32, torch.int64]),
    is_neox=st.booleans(),
    form=st.sampled_from(["heads", "flat", "gaps", "wide table"]),
    seed=seeds,
)
def test_a14_a23_rotary_embedding(device, tokens, heads, dims, dtype, index, is_neox, form, seed):
    """Query and key are views of a packed tensor, whose NaN elsewhere are unread and unchanged."""
    num_heads, num_kv_heads = heads
    head_dim, rotary_dim = dims
    gen = generator(seed)
    total_heads = num_heads + 2 * (num_kv_heads or 0)
    gap = 8 if form == "gaps" else 0
    buffer = poisoned(tokens, total_heads, head_dim + gap, dtype=dtype, device=device)
    packed = buffer[:, :, :head_dim]
    rotated = num_heads + (num_kv_heads or 0)
    packed[:, :rotated, :rotary_dim] = randn(
        tokens, rotated, rotary_dim, dtype=dtype, device=device, gen=gen
    )
    before = packed.clone()
    positions = torch.randint(MAX_POSITION, (tokens,), generator=gen).to(index).to(device)
    views = [packed[:, :num_heads], packed[:, num_heads:rotated] if num_kv_heads else None]
    if form == "flat":
        views = [None if view is None else view.flatten(1) for view in views]
    table = rope_table(rotary_dim, MAX_POSITION, THETA, device=device)
    if form == "wide table":
        unused = poisoned(MAX_POSITION, 4, dtype=torch.float32, device=device)
        table = torch.cat((table, unused), 1)[:, :rotary_dim]
    torch.ops.echo.rotary_embedding(positions, *views, head_dim, table, is_neox)

    want = oracle(before[:, :rotated, :rotary_dim], positions, rotary_dim, is_neox)
    assert_close(packed[:, :rotated, :rotary_dim], want)
    assert_same_bits(packed[:, :rotated, rotary_dim:], before[:, :rotated, rotary_dim:])
    assert_same_bits(packed[:, rotated:], before[:, rotated:])
    assert buffer[:, :, head_dim:].isnan().all()


@pytest.mark.parametrize("is_neox", [True, False])
def test_a14_padded_lanes_leave_the_neighbours_alone(device, is_neox):
    # 3 pairs are padded to 4: with head_dim 6 the padded lanes fall on the next head, and after the
    # last row on the sentinel.
    tokens, heads, dim = 4, 8, 6
    buffer = torch.full((tokens * heads * dim + 64,), 77.0, device=device)
    query = buffer[: tokens * heads * dim].view(tokens, heads, dim)
    query.copy_(randn(tokens, heads, dim, dtype=torch.float32, device=device, gen=generator(0)))
    positions = torch.tensor([3, 0, 100, 17], device=device)
    want = oracle(query, positions, dim, is_neox)
    rotary_embedding(positions, query, None, dim, rope_table(dim, 128, device=device), is_neox)
    assert_close(query, want)
    assert (buffer[query.numel() :] == 77.0).all()


@pytest.mark.parametrize(
    ("position", "rotary_dim"),
    # In bf16 15,962 would be 15,936; at 1,000,000 only pair 0 (inv_freq 1) keeps the table small.
    [(15_962, 128), (131_071, 128), (1_000_000, 2)],
)
def test_a15_angles_of_long_contexts(device, position, rotary_dim):
    gen = generator(position)
    query, key = (
        randn(1, heads, 128, dtype=torch.bfloat16, device=device, gen=gen) for heads in (4, 2)
    )
    positions = torch.tensor([position], device=device)
    wants = [oracle(x, positions, rotary_dim, True) for x in (query, key)]
    table = rope_table(rotary_dim, position + 1, THETA, device=device)
    rotary_embedding(positions, query, key, 128, table)
    for x, want in zip((query, key), wants, strict=True):
        assert_close(x, want)
    if position == 15_962:
        assert table[position, 0].item() == pytest.approx(-0.90802, abs=1e-5)


@pytest.mark.filterwarnings("ignore:invalid value encountered in multiply:RuntimeWarning")
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_positions_outside_the_table_leave_the_row_alone(device, index):
    # Position == table length is the error of a table shorter than the context (pegainfer#220).
    positions = torch.tensor([0, 8, -1, 7, 2**31 - 1], dtype=index, device=device)
    query = randn(5, 2, 16, dtype=torch.float32, device=device, gen=generator(1))
    query[1] = float("inf")  # inf * 0 would be NaN
    before = query.clone()
    rotary_embedding(positions, query, None, 16, rope_table(16, 8, device=device))
    assert_same_bits(query[[1, 2, 4]], before[[1, 2, 4]])
    assert_close(query[[0, 3]], oracle(before[[0, 3]], positions[[0, 3]], 16, True))


@pytest.mark.parametrize("position", [8, -1])
@pytest.mark.usefixtures("debug_checks")
def test_debug_refuses_positions_outside_the_table(device, position):
    positions = torch.tensor([3, position], device=device)
    with pytest.raises(ValueError, match=r"positions holds .*, must lie in \[0, 8\)"):
        rotary_embedding(
            positions, torch.ones(2, 16, device=device), None, 16, rope_table(16, 8, device=device)
        )


def test_an_empty_table_rotates_nothing(device):
    query = torch.ones(2, 16, device=device)
    positions = torch.zeros(2, dtype=torch.int32, device=device)
    rotary_embedding(positions, query, None, 16, rope_table(16, 0, device=device))
    assert (query == 1).all()


def test_returns_its_arguments(device):
    query, key = torch.ones(2, 32, device=device), torch.ones(2, 1, 16, device=device)
    positions = torch.zeros(2, dtype=torch.int32, device=device)
    table = rope_table(16, 8, device=device)
    result = rotary_embedding(positions, query, key, 16, table)
    assert result[0] is query
    assert result[1] is key
    assert rotary_embedding(positions, query, None, 16, table)[1] is None


@pytest.mark.parametrize("is_neox", [True, False])
def test_the_reference_honours_float64(is_neox):
    query = randn(5, 2, 16, dtype=torch.float64, device=torch.device("cpu"), gen=generator(0))
    positions = torch.arange(5)
    want = oracle(query, positions, 16, is_neox)
    inv_freq = THETA ** (-torch.arange(0, 16, 2).double() / 16)
    angles = positions[:, None] * inv_freq
    table = torch.cat([angles.cos(), angles.sin()], 1)
    reference.rotary_embedding(positions, query, None, 16, table, is_neox)
    assert_close(query, want)


def gpu_inputs(tokens, heads, device, head_dim=64, dtype=torch.bfloat16):
    packed = torch.randn(tokens, heads + 4, head_dim, dtype=dtype, device=device)
    positions = torch.randint(MAX_POSITION, (tokens,), device=device)
    return positions, packed, rope_table(head_dim, MAX_POSITION, device=device)


def rotated_copy(positions, packed, table, heads):
    """`packed` with its first `heads` heads rotated as query and the next 2 as key."""
    packed = packed.clone()
    head_dim = packed.shape[2]
    rotary_embedding(positions, packed[:, :heads], packed[:, heads : heads + 2], head_dim, table)
    return packed


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [65_535, 65_536, 70_000])
def test_a22_more_rows_than_a_grid_dimension(cuda, tokens):
    positions, packed, table = gpu_inputs(tokens, 2, cuda, head_dim=16)
    step = tokens // 2 + 1
    halves = [
        rotated_copy(p, x, table, 2)
        for p, x in zip(positions.split(step), packed.split(step), strict=True)
    ]
    assert torch.equal(rotated_copy(positions, packed, table, 2), torch.cat(halves))


@pytest.mark.gpu
def test_a01_more_than_2_31_elements(cuda):
    positions, packed, table = gpu_inputs(2**31 // 4096 + 2, 60, cuda)
    want = rotated_copy(positions[-2:], packed[-2:], table, 60)
    rotary_embedding(positions, packed[:, :60], packed[:, 60:62], 64, table)
    assert torch.equal(packed[-2:], want)


@pytest.mark.gpu
@pytest.mark.multi_gpu
@pytest.mark.usefixtures("two_gpus")
def test_a20_device_that_is_not_current():
    inputs = gpu_inputs(5, 4, torch.device("cuda:0"))
    first = rotated_copy(*inputs, 4)
    second = rotated_copy(*(x.to("cuda:1") for x in inputs), 4)
    assert torch.cuda.current_device() == 0
    assert torch.equal(first.cpu(), second.cpu())


@pytest.mark.gpu
def test_captured_graph_replays_on_new_positions(cuda):
    positions, packed, table = gpu_inputs(5, 4, cuda)
    rotated_copy(positions, packed, table, 4)
    static = packed.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rotary_embedding(positions, static[:, :4], static[:, 4:6], 64, table)
    for seed in (1, 2):
        positions.copy_(torch.randint(MAX_POSITION, (5,), generator=generator(seed)))
        static.copy_(packed)
        graph.replay()
        assert torch.equal(static, rotated_copy(positions, packed, table, 4))


@pytest.mark.gpu
@pytest.mark.parametrize("is_neox", [True, False])
def test_compiled_equals_eager(cuda, is_neox):
    def rotate(positions, packed, table):
        packed = packed * 2
        query, key, value = packed.split([256, 128, 128], dim=1)
        rotary_embedding(positions, query, key, 64, table, is_neox)
        return query, key, value

    compiled = torch.compile(rotate, fullgraph=True, dynamic=True)
    for tokens in (3, 17):
        positions, packed, table = gpu_inputs(tokens, 4, cuda)
        packed = packed.flatten(1)
        for have, want in zip(
            compiled(positions, packed, table), rotate(positions, packed, table), strict=True
        ):
            assert torch.equal(have, want)


def test_a21_opcheck(device):
    overload = torch.ops.echo.rotary_embedding.default
    table = rope_table(6, 16, device=device)
    positions = torch.tensor([3, 0, 15], device=device)
    packed = torch.randn(3, 5 * 8, device=device)
    query, key, _ = packed.split([16, 8, 16], dim=1)
    torch.library.opcheck(overload, (positions, query.clone(), key.clone(), 8, table, True))
    torch.library.opcheck(overload, (positions.int(), query, None, 8, table, False))
    torch.library.opcheck(overload, (positions, query.unflatten(1, (2, 8)), key, 8, table, True))


def bad_calls(arguments):
    """(error, message, the arguments that differ from the good ones)."""
    positions, query, key = (arguments[name] for name in ("positions", "query", "key"))
    table = arguments["cos_sin_cache"]
    strided = torch.stack([positions, positions], 1)[:, 0]
    transposed = key.T.contiguous().T
    yield TypeError, "positions.dtype is float32", {"positions": positions.float()}
    yield ValueError, "positions has shape (4, 1)", {"positions": positions[:, None]}
    yield ValueError, "positions.stride() is (2,)", {"positions": strided}
    yield TypeError, "cos_sin_cache.dtype is bfloat16", {"cos_sin_cache": table.bfloat16()}
    yield ValueError, "cos_sin_cache.shape is (16, 7)", {"cos_sin_cache": table[:, :7]}
    yield ValueError, "cos_sin_cache.shape is (16, 0)", {"cos_sin_cache": table[:, :0]}
    yield ValueError, "cos_sin_cache has shape (16,)", {"cos_sin_cache": table[:, 0]}
    yield ValueError, "from 2 to head_dim = 4", {"head_dim": 4}
    yield ValueError, "query has shape (4,)", {"query": query[:, 0, 0]}
    yield ValueError, "query.shape is (3, 2, 8), must be (4, *, 8)", {"query": query[:3]}
    yield ValueError, "query.stride() is (1, 4), must be 1 in the last", {"query": transposed}
    yield TypeError, "query.dtype is float64", {"query": query.double()}
    yield TypeError, "key.dtype is float16, must be float32", {"key": key.half()}
    yield ValueError, "key.shape is (3, 8), must be (4, *)", {"key": key[:3]}
    yield ValueError, "must have a last dimension divisible by head_dim = 8", {"key": key[:, :4]}


def test_a12_bad_arguments(device):
    good = {
        "positions": torch.zeros(4, dtype=torch.int32, device=device),
        "query": torch.randn(4, 2, 8, device=device),
        "key": torch.randn(4, 8, device=device),
        "head_dim": 8,
        "cos_sin_cache": rope_table(8, 16, device=device),
    }
    rotary_embedding(**good)
    for error, message, bad in bad_calls(good):
        with pytest.raises(error) as caught:
            rotary_embedding(**{**good, **bad})
        assert message in str(caught.value)


def test_a20_mixed_devices_are_refused():
    query = torch.empty(4, 8)
    with pytest.raises(ValueError, match=r"positions\.device is meta, must be cpu as query's is"):
        OPS["rotary_embedding"].check(
            torch.empty(4, dtype=torch.int32, device="meta"), query, None, 8, rope_table(8, 4), True
        )


def test_config_covers_all_pairs_and_bounds_the_tile():
    for half in (1, 3, 64, 128, 4096):
        config = _config(half)
        assert config.block_n >= half
        assert config.block_m == 1 or config.block_m * config.block_n <= 1024


@pytest.mark.parametrize(
    ("number", "half"), [(32, 64), (8, 64), (9, 3), (1, 64), (0, 8), (40, 300)]
)
def test_tiles_hold_all_heads_and_no_more_than_needed(number, half):
    for programs in (1, 2, 4):
        heads = heads_of(_config(half), programs, number, 2 * half + 6, half, True, has_rest=True)
        share = programs * heads.block_h
        assert heads.tiles * share >= number > (heads.tiles - 1) * share
        assert heads.block_half >= half
        assert heads.block_rest >= 6
