"""fused_qkv_rope against float64: a projection, its norm and rotation, and a loop over slots."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echokernels._target import KNOWN_TARGETS
from echokernels.attention import reference
from echokernels.attention.qk_norm_rope_cache import fused_qk_norm_rope_cache
from echokernels.attention.qkv_rope import _blocks, fused_qkv_rope
from echokernels.attention.rope_table import rope_table
from tests.ops.paged_cache import empty_cache
from tests.ops.quantised_cache import (
    CODES_OF_HALVES,
    EACH_CODE,
    HALVES,
    NOT_FINITE,
    code_cache,
    rows_of_a17,
)
from tests.ops.test_kv_cache import oracle as written
from tests.ops.test_rope import oracle as rotated
from tests.strategies import dtypes, generator, poisoned, randn, seeds, strided_randn
from tests.tolerances import assert_close, assert_same_bits

pytestmark = NOT_FINITE

MAX_POSITION = 64
EPS = 1e-6


def oracle(args: dict, head_dim: int) -> torch.Tensor:
    """float64 [tokens, heads, head_dim]"""
    x, weight, positions = (args[n].double().cpu() for n in ("x", "weight", "positions"))
    projected = x @ weight.T
    if args["bias"] is not None:
        projected += args["bias"].double().cpu()
    heads = projected.unflatten(1, (-1, head_dim))
    q, k, v = heads.split([args["num_heads"], args["num_kv_heads"], args["num_kv_heads"]], dim=1)
    in_table = ((positions >= 0) & (positions < MAX_POSITION))[:, None, None]
    done = []
    for part, name in ((q, "q_weight"), (k, "k_weight")):
        new = part
        if args[name] is not None:
            rms = (part.square().mean(-1, keepdim=True) + EPS).sqrt()
            new = part / rms * args[name].double().cpu()
        new = rotated(new, positions, args["cos_sin_cache"].shape[1], args["is_neox"])
        done.append(torch.where(in_table, new, part))
    return torch.cat([*done, v], dim=1)


def make(
    tokens, k, heads, dims, dtype, device, gen, *,
    bias=False, norms=(False, False), is_neox=True, index=torch.int64, pad=0,
):  # fmt: skip
    """Arguments, but for caches, whose projections have a standard deviation of about 1."""
    num_heads, num_kv_heads = heads
    head_dim, rotary_dim = dims
    rows = (num_heads + 2 * num_kv_heads) * head_dim

    def new(*shape, scale=1.0):
        return strided_randn(*shape, dtype=dtype, device=device, gen=gen, pad=pad, scale=scale)

    # A few lie outside the table.
    positions = torch.randint(-2, MAX_POSITION + 2, (tokens,), generator=gen)
    return {
        "x": new(tokens, k),
        "weight": new(rows, k, scale=k**-0.5),
        "positions": positions.to(index).to(device),
        "cos_sin_cache": rope_table(rotary_dim, MAX_POSITION, device=device),
        "bias": randn(rows, dtype=dtype, device=device, gen=gen) if bias else None,
        "q_weight": new(head_dim) if norms[0] else None,
        "k_weight": new(head_dim) if norms[1] else None,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "is_neox": is_neox,
    }


def make_caches(tokens, kv_heads, head_dim, dtype, device, gen, *, head_major=False, pad=0):
    """(caches and slots as keyword arguments, the buffers that the caches are views of)."""
    page_size = 8
    num_pages = -(-2 * tokens // page_size) + 1
    shape = (num_pages, page_size, kv_heads, head_dim)
    (k_cache, k_buffer), (v_cache, v_buffer) = (
        empty_cache(shape, head_major, pad, dtype, device) for _ in range(2)
    )
    # Those at either end are padding and out of range.
    slots = (torch.randperm(num_pages * page_size + 10, generator=gen) - 5)[:tokens]
    paged = {"k_cache": k_cache, "v_cache": v_cache, "slot_mapping": slots.to(device)}
    return paged, (k_buffer, v_buffer)


@given(
    # 17: a tile of 32 tokens; 130: two tiles of 128.
    tokens=st.sampled_from([0, 1, 3, 17, 33, 130]),
    k=st.sampled_from([1, 40, 256]),
    heads=st.sampled_from([(4, 2), (1, 1), (2, 3)]),
    # Whole heads; partial; an odd head; halves and heads that are no power of two.
    dims=st.sampled_from([(64, 64), (80, 32), (7, 6), (96, 96), (40, 2)]),
    bias=st.booleans(),
    norms=st.tuples(st.booleans(), st.booleans()),
    is_neox=st.booleans(),
    paged=st.booleans(),
    head_major=st.booleans(),
    dtype=dtypes,
    index=st.sampled_from([torch.int32, torch.int64]),
    pad=st.sampled_from([0, 3, 16]),
    seed=seeds,
)
def test_a14_a23_fused_qkv_rope(
    device, tokens, k, heads, dims, bias, norms, is_neox, paged, head_major, dtype, index, pad, seed
):
    gen = generator(seed)
    args = make(
        tokens, k, heads, dims, dtype, device, gen,
        bias=bias, norms=norms, is_neox=is_neox, index=index, pad=pad,
    )  # fmt: skip
    head_dim = dims[0]
    caches, buffers = make_caches(
        tokens, heads[1], head_dim, dtype, device, gen, head_major=head_major, pad=pad
    )
    caches["slot_mapping"] = caches["slot_mapping"].to(index)
    before = [caches[name].clone() for name in ("k_cache", "v_cache")]
    wide = poisoned(tokens, args["weight"].shape[0] + pad, dtype=dtype, device=device)
    out = wide[:, : args["weight"].shape[0]]
    assert fused_qkv_rope(**args, **(caches if paged else {}), eps=EPS, out=out) is out
    assert_close(out.unflatten(1, (-1, head_dim)), oracle(args, head_dim))
    assert wide[:, out.shape[1] :].isnan().all()

    slots = caches["slot_mapping"].tolist() if paged else [-1] * tokens
    keys_and_values = out.unflatten(1, (-1, head_dim))[:, heads[0] :].split(heads[1], dim=1)
    for name, old, new in zip(("k_cache", "v_cache"), before, keys_and_values, strict=True):
        assert_same_bits(caches[name], written(old, new, slots))
        caches[name].fill_(float("nan"))
    assert all(buffer.isnan().all() for buffer in buffers)


@EACH_CODE
@given(
    tokens=st.sampled_from([0, 1, 3, 17, 33, 130]),
    k=st.sampled_from([1, 40, 256]),
    heads=st.sampled_from([(4, 2), (1, 1), (2, 3)]),
    dims=st.sampled_from([(64, 64), (80, 32), (7, 6), (96, 96), (40, 2)]),
    bias=st.booleans(),
    norms=st.tuples(st.booleans(), st.booleans()),
    is_neox=st.booleans(),
    head_major=st.booleans(),
    scale_head_major=st.booleans(),
    scale_pad=st.sampled_from([0, 1]),
    dtype=dtypes,
    index=st.sampled_from([torch.int32, torch.int64]),
    pad=st.sampled_from([0, 3, 16]),
    seed=seeds,
)
def test_a05_a07_a09_quantised_caches_receive_the_codes_of_qkv(
    device, code, tokens, k, heads, dims, bias, norms, is_neox, head_major, scale_head_major,
    scale_pad, dtype, index, pad, seed,
):  # fmt: skip
    gen = generator(seed)
    args = make(
        tokens, k, heads, dims, dtype, device, gen,
        bias=bias, norms=norms, is_neox=is_neox, index=index, pad=pad,
    )  # fmt: skip
    # A token of zeros, one that is not finite, one large.
    args["x"][1:2], args["x"][2:3] = 0.0, float("nan")
    args["x"][3:4] *= 1000.0
    num_pages, page_size = -(-2 * tokens // 8) + 1, 8
    slots = (torch.randperm(num_pages * page_size + 10, generator=gen) - 5)[:tokens].to(index)
    keys, values = (
        code_cache(
            (num_pages, page_size, heads[1], dims[0]), code, device, head_major=head_major, pad=pad,
            scale_head_major=scale_head_major, scale_pad=by,
        )
        for by in (scale_pad, 0)
    )  # fmt: skip
    out = fused_qkv_rope(
        **args, eps=EPS, k_cache=keys.codes, v_cache=values.codes, slot_mapping=slots.to(device),
        k_scale=keys.scale, v_scale=values.scale,
    )  # fmt: skip
    assert_close(out.unflatten(1, (-1, dims[0])), oracle(args, dims[0]))
    new = out.unflatten(1, (-1, dims[0]))[:, heads[0] :].split(heads[1], dim=1)
    keys.assert_received(new[0], slots)
    values.assert_received(new[1], slots)


def write_quantised(rows, code, device):
    """Caches of codes that received `rows`, [tokens, head_dim], as key and value: slot i holds
    token i."""
    tokens, head_dim = rows.shape
    k, v = (code_cache((1, tokens + 1, 1, head_dim), code, device) for _ in range(2))
    fused_qkv_rope(
        rows,
        torch.eye(head_dim, device=device).repeat(3, 1),
        torch.full((tokens,), -1, device=device),
        rope_table(2, 4, device=device),
        num_heads=1, num_kv_heads=1, head_dim=head_dim, k_cache=k.codes, v_cache=v.codes,
        slot_mapping=torch.arange(tokens, device=device), k_scale=k.scale, v_scale=v.scale,
    )  # fmt: skip
    return k, v


def test_a16_halves_round_to_even(device):
    for cache in write_quantised(torch.tensor([HALVES], device=device), torch.int8, device):
        assert cache.scale[0, 0].item() == 1.0
        assert cache.codes[0, 0].tolist() == [CODES_OF_HALVES]


@EACH_CODE
@pytest.mark.parametrize("only", [None, 0, 1, 2])
def test_a17_zero_rows_and_masked_lanes(device, code, only):
    rows = rows_of_a17(device)
    rows = rows if only is None else rows[only : only + 1]
    for cache in write_quantised(rows, code, device):
        if only in (None, 0):
            assert cache.scale[0, 0].item() == pytest.approx(1e-12)
            assert not cache.codes[0, 0].float().any()
        cache.assert_received(rows[:, None], torch.arange(len(rows)))


def test_a21_opcheck_quantised(device):
    k = code_cache((3, 4, 1, 8), torch.int8, device, scale_head_major=True)
    v = code_cache((3, 4, 1, 8), torch.int8, device, head_major=True, scale_pad=1)
    x, weight = torch.randn(4, 16, device=device), torch.randn(32, 16, device=device)
    index = torch.arange(4, device=device)
    args = (
        torch.zeros(4, 32, device=device), x, weight, None, index, rope_table(8, 4, device=device),
        None, None, EPS, 2, 1, 8, True, k.codes, v.codes, index - 1, k.scale, v.scale,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.echo.fused_qkv_rope.default, args)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_model_shapes(device, tokens, normed):
    args = make(
        tokens, 576, (9, 3), (64, 64), torch.bfloat16, device, generator(0), norms=(normed, normed)
    )
    out = fused_qkv_rope(**args)
    assert_close(out.unflatten(1, (-1, 64)), oracle(args, 64))


@pytest.mark.parametrize("is_neox", [True, False])
def test_a14_padded_rows_leave_the_neighbours_alone(device, is_neox):
    # Heads of 6 columns are padded to 8 or 16: with the padding come rows of the next head, and
    # after the last one a row of the weight that is NaN.
    args = make(4, 24, (3, 2), (6, 6), torch.float32, device, generator(0), is_neox=is_neox)
    longer = poisoned(43, 24, dtype=torch.float32, device=device)
    longer[:42] = args["weight"]
    args["weight"] = longer[:42]
    wide = torch.full((5, 42), 77.0, device=device)
    out = fused_qkv_rope(**args, out=wide[:4])
    assert_close(out.unflatten(1, (-1, 6)), oracle(args, 6))
    assert (wide[4] == 77.0).all()


def test_tokens_outside_the_table_are_only_projected(device):
    args = make(5, 40, (2, 1), (16, 16), torch.float32, device, generator(0), norms=(True, True))
    args["positions"] = torch.tensor(
        [MAX_POSITION, 0, -1, MAX_POSITION - 1, 2**31 - 1], device=device
    )
    # Behind the table's last row lies NaN.
    longer = poisoned(MAX_POSITION + 1, 16, dtype=torch.float32, device=device)
    longer[:MAX_POSITION] = args["cos_sin_cache"]
    args["cos_sin_cache"] = longer[:MAX_POSITION]
    assert_close(fused_qkv_rope(**args).unflatten(1, (-1, 16)), oracle(args, 16))


def test_other_tokens_do_not_reach_a_row(device):
    args = make(5, 40, (2, 1), (16, 16), torch.float32, device, generator(0), norms=(True, True))
    want = fused_qkv_rope(**args)
    args["x"][2] = float("nan")
    out = fused_qkv_rope(**args)
    assert out[2].isnan().all()
    assert torch.equal(out[[0, 1, 3, 4]], want[[0, 1, 3, 4]])


@pytest.mark.filterwarnings("ignore:invalid value encountered in multiply:RuntimeWarning")
def test_infinities_stay_in_their_pair(device):
    # The first 4 of 8 columns rotate; a head's other columns are not mixed with each other.
    args = make(1, 8, (1, 1), (8, 4), torch.float32, device, generator(0))
    args["positions"].fill_(3)
    args["bias"] = torch.zeros(24, device=device)
    args["bias"][5] = float("inf")
    out = fused_qkv_rope(**args)
    assert (~out.isfinite()).nonzero().tolist() == [[0, 5]]


def test_the_reference_honours_float64():
    args = make(
        5, 24, (2, 1), (16, 8), torch.float64, torch.device("cpu"), generator(0),
        bias=True, norms=(True, True),
    )  # fmt: skip
    angles = torch.arange(MAX_POSITION)[:, None] * 10_000.0 ** (-torch.arange(0, 8, 2).double() / 8)
    args["cos_sin_cache"] = torch.cat([angles.cos(), angles.sin()], 1)
    out = torch.empty(5, 64, dtype=torch.float64)
    ordered = [args[n] for n in ("x", "weight", "bias", "positions", "cos_sin_cache")]
    reference.fused_qkv_rope(
        out, *ordered, args["q_weight"], args["k_weight"], EPS, 2, 1, 16, True, *[None] * 5
    )
    assert_close(out.unflatten(1, (-1, 16)), oracle(args, 16))


MODELS = [
    pytest.param(4096, (32, 8), False, id="llama-8b"),
    pytest.param(1024, (16, 8), True, id="qwen3-0.6b"),
    pytest.param(8192, (8, 1), False, id="70b-tp8"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 33, 64, 500])
@pytest.mark.parametrize(("k", "heads", "normed"), MODELS)
def test_agrees_with_the_separate_ops(cuda, tokens, k, heads, normed):
    gen = generator(tokens)
    args = make(tokens, k, heads, (128, 128), torch.bfloat16, cuda, gen, norms=(normed, normed))
    caches, _ = make_caches(tokens, heads[1], 128, torch.bfloat16, cuda, gen)
    out = fused_qkv_rope(**args, **caches)
    written_keys = caches["k_cache"].clone()
    separate = args.pop("x") @ args.pop("weight").T
    del args["bias"]
    fused_qk_norm_rope_cache(separate, **args, **caches)
    # Separately the projection is rounded too, and a pair takes its error from both members.
    assert_close(out, separate.double(), roundings=4)
    assert torch.equal(written_keys.isnan(), caches["k_cache"].isnan())


@pytest.mark.gpu
def test_a01_more_than_2_31_elements(cuda):
    tokens = 2**31 // 4096 + 2
    args = make(2, 4096, (2, 1), (16, 16), torch.bfloat16, cuda, generator(0))
    want = oracle(args, 16)
    x = torch.zeros(tokens, 4096, dtype=torch.bfloat16, device=cuda)
    x[-2:] = args["x"]
    positions = torch.zeros(tokens, dtype=torch.int64, device=cuda)
    positions[-2:] = args["positions"]
    out = fused_qkv_rope(**{**args, "x": x, "positions": positions})
    assert_close(out[-2:].unflatten(1, (-1, 16)), want)


@pytest.mark.gpu
def test_compiled_equals_eager(cuda):
    compiled = torch.compile(fused_qkv_rope, fullgraph=True, dynamic=True)
    for tokens in (3, 17):
        args = make(tokens, 64, (4, 2), (32, 32), torch.bfloat16, cuda, generator(tokens))
        assert torch.equal(compiled(**args), fused_qkv_rope(**args))


@pytest.mark.parametrize("position", [MAX_POSITION, -1])
@pytest.mark.usefixtures("debug_checks")
def test_debug_refuses_positions_outside_the_table(device, position):
    args = make(3, 8, (1, 1), (8, 8), torch.float32, device, generator(0))
    args["positions"].fill_(position)
    with pytest.raises(ValueError, match=r"positions holds .*, must lie in \[0, 64\)"):
        fused_qkv_rope(**args)


def bad_calls(args, caches):
    """(error, message, the arguments that differ from the good ones)."""
    x, weight = args["x"], args["weight"]
    yield ValueError, "x has shape (8,), must have 2 dimensions", {"x": x[0]}
    yield TypeError, "x.dtype is float64", {"x": x.double()}
    yield ValueError, "x.shape is (3, 8), must be (4, *)", {"x": x[:3], "out": x.new_empty(4, 32)}
    yield ValueError, "weight.shape is (32, 7), must be (*, 8)", {"weight": weight[:, :7]}
    yield ValueError, "weight.stride() is (1, 32)", {"weight": weight.T.contiguous().T}
    yield TypeError, "weight.dtype is float16, must be float32", {"weight": weight.half()}
    yield ValueError, "bias.shape is (16,), must be (32)", {"bias": weight[:16, 0].contiguous()}
    yield ValueError, "weight.shape is (32, 8), must be (40, *)", {"out": x.new_empty(4, 40),
                                                                  "num_heads": 3}  # fmt: skip
    yield ValueError, "qkv.shape is (4, 32), must be (4, 40)", {"num_heads": 3}
    yield ValueError, "num_kv_heads is 0, must be at least 1", {"num_kv_heads": 0}
    yield TypeError, "qkv.dtype is float16, must be float32", {"out": x.new_empty(4, 32).half()}
    yield ValueError, "eps is -1.0, must be at least 0", {"eps": -1.0}
    yield ValueError, "q_weight.shape is (4,), must be (8)", {"q_weight": x[0, :4]}
    yield ValueError, "k_cache is given, must be None", {"k_cache": caches["k_cache"]}
    yield ValueError, "k_scale is given, must be None", {**caches, "k_scale": x}
    yield ValueError, "v_scale is given, must be None: v_cache is None", {"v_scale": x}
    codes = {**caches, **{name: caches[name].char() for name in ("k_cache", "v_cache")}}
    yield ValueError, "k_scale is None, must be a tensor", codes
    yield TypeError, "k_cache.dtype is float16", {**caches, "k_cache": caches["k_cache"].half()}


def test_a12_bad_arguments(device):
    gen = generator(0)
    good = make(4, 8, (2, 1), (8, 8), torch.float32, device, gen)
    caches, _ = make_caches(4, 1, 8, torch.float32, device, gen)
    fused_qkv_rope(**good, **caches)
    for error, message, bad in bad_calls(good, caches):
        with pytest.raises(error) as caught:
            fused_qkv_rope(**{**good, **bad})
        assert message in str(caught.value)


def test_a20_mixed_devices_are_refused():
    args = make(4, 8, (2, 1), (8, 8), torch.float32, torch.device("cpu"), generator(0))
    args["bias"] = torch.empty(32, device="meta")
    with pytest.raises(ValueError, match=r"bias\.device is meta, must be cpu as x's is"):
        fused_qkv_rope(**args)


def test_tokens_are_split_while_rows_leave_sms_idle():
    def blocks(num_tokens, heads, whole_heads=False, head_dim=128):
        return _blocks(num_tokens, heads, head_dim, whole_heads, 2, KNOWN_TARGETS["sm_90"])

    # 64 rows make two tiles of a head.
    assert [blocks(n, 32) for n in (1, 16, 17, 32, 33, 64)] == [
        (64, 16), (64, 16), (64, 16), (64, 16), (64, 32), (64, 32),
    ]  # fmt: skip
    assert [blocks(64, heads)[1] for heads in (16, 17, 33, 34)] == [16, 32, 32, 64]  # 132 SMs
    # Of 1,280 rows, 1 to 16 tokens take 16 at a time.
    assert [blocks(n, 10) for n in (16, 17, 64)] == [(16, 16), (64, 16), (64, 16)]


def test_whole_heads_stay_in_one_program():
    def blocks(num_tokens, heads, head_dim=128):
        return _blocks(num_tokens, heads, head_dim, True, 2, KNOWN_TARGETS["sm_90"])

    tokens = (1, 16, 17, 32, 64, 65, 4096)
    assert [blocks(n, 32)[1] for n in tokens] == [16, 16, 16, 16, 16, 32, 128]
    assert [blocks(n, 48)[1] for n in (32, 64, 4096)] == [16, 32, 128]
    assert {blocks(n, heads)[0] for n in tokens for heads in (1, 10, 48)} == {128}
    assert blocks(4096, 32, head_dim=256) == (256, 64)
