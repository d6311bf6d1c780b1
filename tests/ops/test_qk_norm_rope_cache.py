"""fused_qk_norm_rope_cache against a float64 oracle, and against the ops that it fuses."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import echokernels
from echokernels._library import OPS
from echokernels.attention import reference
from echokernels.attention.qk_norm_rope_cache import _config, fused_qk_norm_rope_cache
from echokernels.attention.rope_table import rope_table
from tests.ops.paged_cache import empty_cache
from tests.ops.quant_oracle import uneven_rows
from tests.ops.quantised_cache import (
    CODES_OF_HALVES,
    EACH_CODE,
    HALVES,
    NOT_FINITE,
    code_cache,
    rows_of_a17,
)
from tests.ops.rope_oracle import THETA
from tests.ops.rope_oracle import oracle as rotated
from tests.strategies import dtypes, generator, randn, seeds, strided_randn, token_counts
from tests.tolerances import assert_close, assert_same_bits

pytestmark = NOT_FINITE

MAX_POSITION = 4096
EPS = 1e-5

heads_counts = st.sampled_from([(1, 1), (4, 2), (9, 3), (2, 5), (40, 1)])
# Whole heads; partial; an odd head; halves that are no power of two.
head_dims = st.sampled_from([(64, 64), (80, 32), (7, 6), (96, 96), (40, 2)])
indices = st.sampled_from([torch.int32, torch.int64])


def oracle(
    heads: torch.Tensor,  # [tokens, heads, head_dim]
    weight: torch.Tensor | None,
    positions: torch.Tensor,
    rotary_dim: int,
    is_neox: bool,
) -> torch.Tensor:
    heads = heads.double().cpu()
    if weight is not None:
        rms = (heads.square().mean(-1, keepdim=True) + EPS).sqrt()
        heads = heads / rms * weight.double().cpu()
    return rotated(heads, positions, rotary_dim, is_neox)


def split(qkv, num_heads, num_kv_heads, head_dim):
    """q, k, v: views [tokens, heads, head_dim] of `qkv`."""
    heads = qkv.unflatten(1, (num_heads + 2 * num_kv_heads, head_dim))
    return heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)


def weights(norms, head_dim, dtype, device, gen):
    """q_weight and k_weight, one of them None unless `norms` is "qk"."""
    return [
        randn(head_dim, dtype=dtype, device=device, gen=gen) if name in norms else None
        for name in "qk"
    ]


@given(
    tokens=token_counts,
    heads=heads_counts,
    dims=head_dims,
    dtype=dtypes,
    weight_dtype=dtypes,
    index=indices,
    is_neox=st.booleans(),
    norms=st.sampled_from(["qk", "q", "k", ""]),
    pad=st.sampled_from([0, 5, 16]),
    seed=seeds,
)
def test_a14_a23_norm_and_rotation(
    device, tokens, heads, dims, dtype, weight_dtype, index, is_neox, norms, pad, seed
):
    gen = generator(seed)
    head_dim, rotary_dim = dims
    width = (heads[0] + 2 * heads[1]) * head_dim
    # Rows lie between NaN that must neither be read nor overwritten.
    qkv = strided_randn(tokens, width, dtype=dtype, device=device, gen=gen, pad=pad)
    before = qkv.clone()
    q_weight, k_weight = weights(norms, head_dim, weight_dtype, device, gen)
    positions = torch.randint(MAX_POSITION, (tokens,), generator=gen).to(index).to(device)
    table = rope_table(rotary_dim, MAX_POSITION, THETA, device=device)
    torch.ops.echo.fused_qk_norm_rope_cache(
        qkv, positions, table, q_weight, k_weight, EPS, *heads, head_dim, is_neox,
        None, None, None, None, None,
    )  # fmt: skip

    q, k, v = split(qkv, *heads, head_dim)
    old_q, old_k, old_v = split(before, *heads, head_dim)
    assert_close(q, oracle(old_q, q_weight, positions, rotary_dim, is_neox))
    assert_close(k, oracle(old_k, k_weight, positions, rotary_dim, is_neox))
    assert_same_bits(v, old_v)
    if pad and tokens:
        assert qkv.as_strided((tokens, width + pad), qkv.stride())[:, width:].isnan().all()


@given(
    tokens=token_counts,
    heads=heads_counts,
    dims=head_dims,
    page_size=st.sampled_from([1, 8, 24]),
    head_major=st.booleans(),
    pad=st.sampled_from([0, 3, 8]),
    dtype=dtypes,
    index=indices,
    is_neox=st.booleans(),
    norms=st.sampled_from(["qk", "q", ""]),
    seed=seeds,
)
def test_a05_a07_a09_the_caches_receive_the_bits_of_qkv(
    device, tokens, heads, dims, page_size, head_major, pad, dtype, index, is_neox, norms, seed
):
    """Padding too, in all its forms: positions outside the table, slots below 0 and beyond."""
    gen = generator(seed)
    head_dim, rotary_dim = dims
    num_heads, num_kv_heads = heads
    width = (num_heads + 2 * num_kv_heads) * head_dim
    qkv = randn(tokens, width, dtype=dtype, device=device, gen=gen)
    before = qkv.clone()
    q_weight, k_weight = weights(norms, head_dim, dtype, device, gen)
    positions = torch.randint(-8, MAX_POSITION + 8, (tokens,), generator=gen).to(index).to(device)
    table = rope_table(rotary_dim, MAX_POSITION, THETA, device=device)
    num_pages = -(-2 * tokens // page_size) + 1
    slots = (torch.randperm(num_pages * page_size + 10, generator=gen) - 5)[:tokens]
    shape = (num_pages, page_size, num_kv_heads, head_dim)
    (k_cache, k_buffer), (v_cache, v_buffer) = (
        empty_cache(shape, head_major, pad, dtype, device) for _ in range(2)
    )
    want_k, want_v = k_buffer.clone(), v_buffer.clone()
    fused_qk_norm_rope_cache(
        qkv, positions, table, q_weight, k_weight, EPS,
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, is_neox=is_neox,
        k_cache=k_cache, v_cache=v_cache, slot_mapping=slots.to(index).to(device),
    )  # fmt: skip

    outside = (positions < 0) | (positions >= MAX_POSITION)
    assert_same_bits(qkv[outside], before[outside])
    q, k, v = split(qkv, *heads, head_dim)
    for new, old, weight in zip(
        (q, k), split(before, *heads, head_dim), (q_weight, k_weight), strict=False
    ):
        inside = ~outside
        want = oracle(old[inside], weight, positions[inside], rotary_dim, is_neox)
        assert_close(new[inside], want)
    for buffer, want, new in ((k_buffer, want_k, k), (v_buffer, want_v, v)):
        pages = want[1:-1, ..., :head_dim]
        pages = pages.transpose(1, 2) if head_major else pages
        for token, slot in enumerate(slots.tolist()):
            if 0 <= slot < num_pages * page_size:
                pages[slot // page_size, slot % page_size] = new[token]
        assert_same_bits(buffer, want)


@EACH_CODE
@given(
    tokens=token_counts,
    heads=heads_counts,
    dims=head_dims,
    page_size=st.sampled_from([1, 8, 24]),
    head_major=st.booleans(),
    pad=st.sampled_from([0, 3, 8]),
    scale_head_major=st.booleans(),
    scale_pad=st.sampled_from([0, 1]),
    dtype=dtypes,
    index=indices,
    is_neox=st.booleans(),
    norms=st.sampled_from(["qk", "q", ""]),
    seed=seeds,
)
def test_a05_a07_a09_quantised_caches_receive_the_codes_of_qkv(
    device, code, tokens, heads, dims, page_size, head_major, pad, scale_head_major, scale_pad,
    dtype, index, is_neox, norms, seed,
):  # fmt: skip
    gen = generator(seed)
    head_dim, rotary_dim = dims
    num_heads, num_kv_heads = heads
    all_heads = num_heads + 2 * num_kv_heads
    qkv = uneven_rows(tokens, all_heads, head_dim, dtype=dtype, device=device, gen=gen).flatten(1)
    plain = qkv.clone()
    q_weight, k_weight = weights(norms, head_dim, dtype, device, gen)
    positions = torch.randint(-8, MAX_POSITION + 8, (tokens,), generator=gen).to(index).to(device)
    table = rope_table(rotary_dim, MAX_POSITION, THETA, device=device)
    num_pages = -(-2 * tokens // page_size) + 1
    slots = (torch.randperm(num_pages * page_size + 10, generator=gen) - 5)[:tokens].to(index)
    shape = (num_pages, page_size, num_kv_heads, head_dim)
    k, v = (
        code_cache(
            shape, code, device, head_major=head_major, pad=pad,
            scale_head_major=scale_head_major, scale_pad=by,
        )
        for by in (scale_pad, 0)
    )  # fmt: skip
    options = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim,
               "is_neox": is_neox, "q_weight": q_weight, "k_weight": k_weight}  # fmt: skip
    fused_qk_norm_rope_cache(
        qkv, positions, table, **options, k_cache=k.codes, v_cache=v.codes,
        slot_mapping=slots.to(device), k_scale=k.scale, v_scale=v.scale,
    )  # fmt: skip
    assert_same_bits(qkv, fused_qk_norm_rope_cache(plain, positions, table, **options))
    _, keys, values = split(qkv, *heads, head_dim)
    k.assert_received(keys, slots)
    v.assert_received(values, slots)


def write_quantised(key, value, code, device):
    """Caches of codes that received `key` and `value`, [tokens, 1, head_dim], as they are: slot i
    holds token i."""
    tokens, _, head_dim = key.shape
    k, v = (code_cache((1, tokens + 1, 1, head_dim), code, device) for _ in range(2))
    fused_qk_norm_rope_cache(
        torch.cat([key, key, value], 1).flatten(1),
        torch.full((tokens,), -1, device=device),
        rope_table(2, 4, device=device),
        num_heads=1, num_kv_heads=1, head_dim=head_dim, k_cache=k.codes, v_cache=v.codes,
        slot_mapping=torch.arange(tokens, device=device), k_scale=k.scale, v_scale=v.scale,
    )  # fmt: skip
    return k, v


def test_a16_halves_round_to_even(device):
    key = torch.tensor([[HALVES]], device=device)
    k, v = write_quantised(key, -key, torch.int8, device)
    assert k.scale[0, 0].item() == v.scale[0, 0].item() == 1.0
    assert k.codes[0, 0].tolist() == [CODES_OF_HALVES]
    assert v.codes[0, 0].tolist() == [[-code for code in CODES_OF_HALVES]]


@EACH_CODE
@pytest.mark.parametrize("only", [None, 0, 1, 2])
def test_a17_zero_rows_and_masked_lanes(device, code, only):
    key = rows_of_a17(device)[:, None]
    key = key if only is None else key[only : only + 1]
    for cache in write_quantised(key, key, code, device):
        if only in (None, 0):
            assert cache.scale[0, 0].item() == pytest.approx(1e-12)
            assert not cache.codes[0, 0].float().any()
        cache.assert_received(key, torch.arange(len(key)))


def test_a21_opcheck_quantised(device):
    k = code_cache((3, 4, 1, 8), torch.int8, device, scale_head_major=True)
    v = code_cache((3, 4, 1, 8), torch.int8, device, head_major=True, scale_pad=1)
    good = good_arguments(device) | {"k_cache": k.codes, "v_cache": v.codes}
    torch.library.opcheck(
        torch.ops.echo.fused_qk_norm_rope_cache.default, (*good.values(), k.scale, v.scale)
    )


@given(
    tokens=token_counts,
    heads=heads_counts,
    dims=head_dims,
    dtype=dtypes,
    is_neox=st.booleans(),
    seed=seeds,
)
def test_without_weights_equals_the_separate_ops(device, tokens, heads, dims, dtype, is_neox, seed):
    gen = generator(seed)
    head_dim, rotary_dim = dims
    num_heads, num_kv_heads = heads
    width = (num_heads + 2 * num_kv_heads) * head_dim
    fused = randn(tokens, width, dtype=dtype, device=device, gen=gen)
    separate = fused.clone()
    positions = torch.randint(-1, 40, (tokens,), generator=gen).to(device)
    slots = (torch.randperm(2 * tokens, generator=gen) - 2)[:tokens].to(device)
    table = rope_table(rotary_dim, 32, device=device)
    caches = torch.zeros(2, tokens + 1, 2, num_kv_heads, head_dim, dtype=dtype, device=device)
    want_caches = caches.clone()
    fused_qk_norm_rope_cache(
        fused, positions, table,
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, is_neox=is_neox,
        k_cache=caches[0], v_cache=caches[1], slot_mapping=slots,
    )  # fmt: skip
    q, k, v = split(separate, *heads, head_dim)
    echokernels.rotary_embedding(positions, q, k, head_dim, table, is_neox)
    echokernels.reshape_and_cache(k, v, *want_caches, slots)
    assert_same_bits(fused, separate)
    assert_same_bits(caches, want_caches)


@pytest.mark.parametrize(
    ("position", "rotary_dim"),
    # At 1,000,000 only pair 0 (inv_freq 1) keeps the table small.
    [(15_962, 128), (131_071, 128), (1_000_000, 2)],
)
def test_a15_angles_of_long_contexts(device, position, rotary_dim):
    gen = generator(position)
    qkv = randn(1, 8 * 128, dtype=torch.bfloat16, device=device, gen=gen)
    weight = randn(128, dtype=torch.bfloat16, device=device, gen=gen)
    positions = torch.tensor([position], device=device)
    old_q, old_k, _ = split(qkv.clone(), 4, 2, 128)
    table = rope_table(rotary_dim, position + 1, THETA, device=device)
    fused_qk_norm_rope_cache(
        qkv, positions, table, weight, weight, EPS, num_heads=4, num_kv_heads=2, head_dim=128
    )
    q, k, _ = split(qkv, 4, 2, 128)
    assert_close(q, oracle(old_q, weight, positions, rotary_dim, True))
    assert_close(k, oracle(old_k, weight, positions, rotary_dim, True))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_padding_keeps_its_bits_and_touches_nobody(device):
    """A captured graph's unused rows: no position, no slot, and anything at all in their heads."""
    qkv = randn(4, 4 * 8, dtype=torch.bfloat16, device=device, gen=generator(0))
    qkv[1], qkv[3] = float("nan"), float("inf")
    before = qkv.clone()
    weight = torch.ones(8, dtype=torch.bfloat16, device=device)
    caches = torch.full((2, 2, 4, 1, 8), 77.0, dtype=torch.bfloat16, device=device)
    fused_qk_norm_rope_cache(
        qkv, torch.tensor([0, -1, 5, 2**31 - 1], device=device), rope_table(8, 6, device=device),
        weight, weight, num_heads=2, num_kv_heads=1, head_dim=8,
        k_cache=caches[0], v_cache=caches[1],
        slot_mapping=torch.tensor([0, -1, 7, -1], device=device),
    )  # fmt: skip
    assert_same_bits(qkv[[1, 3]], before[[1, 3]])
    assert qkv[[0, 2]].isfinite().all()
    written = caches.flatten(1, 2)
    assert_same_bits(written[0][[0, 7]], split(qkv, 2, 1, 8)[1][[0, 2]])
    assert (written[:, 1:7] == 77.0).all()


@pytest.mark.parametrize("is_neox", [True, False])
def test_the_reference_honours_float64(is_neox):
    gen, cpu = generator(0), torch.device("cpu")
    qkv, weight = (
        randn(*shape, dtype=torch.float64, device=cpu, gen=gen) for shape in [(5, 64), (16,)]
    )
    positions = torch.arange(5)
    old_q, old_k, old_v = split(qkv.clone(), 2, 1, 16)
    angles = positions[:, None] * THETA ** (-torch.arange(0, 16, 2).double() / 16)
    table = torch.cat([angles.cos(), angles.sin()], 1)
    reference.fused_qk_norm_rope_cache(
        qkv, positions, table, weight, None, EPS, 2, 1, 16, is_neox, None, None, None, None, None
    )
    q, k, v = split(qkv, 2, 1, 16)
    assert_close(q, oracle(old_q, weight, positions, 16, is_neox))
    assert_close(k, oracle(old_k, None, positions, 16, is_neox))
    assert torch.equal(v, old_v)


def good_arguments(device):
    """In the schema's order, but for the scales."""
    cache = torch.zeros(3, 16, 1, 8, device=device)
    return {
        "qkv": torch.randn(4, 32, device=device),
        "positions": torch.zeros(4, dtype=torch.int32, device=device),
        "cos_sin_cache": rope_table(8, 16, device=device),
        "q_weight": torch.ones(8, device=device),
        "k_weight": torch.ones(8, device=device),
        "eps": 1e-6,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 8,
        "is_neox": True,
        "k_cache": cache,
        "v_cache": cache.clone(),
        "slot_mapping": torch.zeros(4, dtype=torch.int64, device=device),
    }


def bad_calls(good):
    """(error, message, the arguments that differ from the good ones)."""
    qkv, weight, cache, slots = (
        good[name] for name in ("qkv", "q_weight", "k_cache", "slot_mapping")
    )
    empty = cache[:, :0]
    scale = torch.ones(cache.shape[:3], device=cache.device)
    codes = {"k_cache": cache.char(), "v_cache": cache.char(), "k_scale": scale, "v_scale": scale}
    absent = {"k_cache": None, "v_cache": None, "slot_mapping": None}
    no_scales = "is given, must be None: k_cache.dtype is torch.float32, which has no scales"
    together = "is given, must be None: k_cache, v_cache and slot_mapping are given together"
    yield ValueError, f"k_scale {no_scales}", {"k_scale": weight}
    yield ValueError, f"v_scale {no_scales}", {"v_scale": weight}
    yield (
        ValueError,
        "k_scale is given, must be None: k_cache is None",
        {**absent, "k_scale": scale},
    )
    yield (
        ValueError,
        "v_scale is given, must be None: v_cache is None",
        {**absent, "v_scale": scale},
    )
    yield ValueError, "k_scale is None, must be a tensor", {**codes, "k_scale": None}
    yield ValueError, "v_scale.shape is (3, 16), must be (3", {**codes, "v_scale": scale[..., 0]}
    yield ValueError, "num_heads is 0, must be at least 1", {"num_heads": 0}
    yield ValueError, "num_kv_heads is -1, must be at least 1", {"num_kv_heads": -1}
    yield ValueError, "eps is nan, must be at least 0", {"eps": float("nan")}
    yield TypeError, "positions.dtype is float32", {"positions": good["positions"].float()}
    yield ValueError, "rotary_dim from 2 to head_dim = 4", {"head_dim": 4}
    yield ValueError, "qkv.shape is (4, 32), must be (4, 40)", {"num_heads": 3}
    yield ValueError, "qkv.shape is (4, 4, 8), must be (4, 32)", {"qkv": qkv.view(4, 4, 8)}
    yield ValueError, "qkv.shape is (3, 32), must be (4, 32)", {"qkv": qkv[:3]}
    yield ValueError, "qkv.stride() is (1, 4), must be 1 in the", {"qkv": qkv.T.contiguous().T}
    yield TypeError, "qkv.dtype is float64", {"qkv": qkv.double()}
    yield ValueError, "q_weight.shape is (7,), must be (8)", {"q_weight": weight[:7]}
    yield TypeError, "k_weight.dtype is int32", {"k_weight": weight.int()}
    yield TypeError, "k_cache.dtype is float16, must be float32", {"k_cache": cache.half()}
    yield TypeError, "v_cache.dtype is int8, must be float32", {"v_cache": cache.char()}
    yield ValueError, "k_cache.shape is (3, 16, 1, 7)", {"k_cache": cache[..., :7]}
    yield ValueError, "v_cache.shape is (2, 16, 1, 8)", {"v_cache": cache[:2]}
    yield ValueError, "a page size of at least 1", {"k_cache": empty, "v_cache": empty}
    yield ValueError, "slot_mapping.shape is (3,), must be (4)", {"slot_mapping": slots[:3]}
    yield TypeError, "slot_mapping.dtype is float32", {"slot_mapping": slots.float()}
    yield ValueError, f"slot_mapping {together}", {"k_cache": None, "v_cache": None}
    yield ValueError, f"k_cache {together}", {"slot_mapping": None}


def test_a12_bad_arguments(device):
    good = good_arguments(device)
    assert fused_qk_norm_rope_cache(**good) is good["qkv"]
    for error, message, bad in bad_calls(good):
        with pytest.raises(error) as caught:
            fused_qk_norm_rope_cache(**{**good, **bad})
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("positions", 16, r"positions holds 0\.\.16, must lie in \[0, 16\)"),
        ("slot_mapping", 48, r"slot_mapping holds -1\.\.48, must lie in"),
    ],
)
@pytest.mark.usefixtures("debug_checks")
def test_debug_refuses_indices_beyond(device, name, value, message):
    good = good_arguments(device)
    good["slot_mapping"][2] = -1  # padding
    good[name][1] = value
    with pytest.raises(ValueError, match=message):
        fused_qk_norm_rope_cache(**good)


def test_a20_mixed_devices_are_refused():
    good = good_arguments(torch.device("cpu"))
    for name in ("positions", "k_weight", "slot_mapping"):
        bad = {**good, name: good[name].to("meta")}
        with pytest.raises(ValueError, match=rf"{name}\.device is meta, must be cpu as qkv's is"):
            OPS["fused_qk_norm_rope_cache"].check(*bad.values(), None, None)


def test_config_bounds_the_program():
    for head_dim in (1, 7, 80, 128, 256, 8192):
        config = _config(head_dim)
        assert config.block_m == 1 or config.block_m * head_dim <= 2048
