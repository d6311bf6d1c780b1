"""Attention from caches of codes against the float64 oracle, over what the codes stand for."""

import math
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echokernels import flash_attn_varlen, paged_attention
from echokernels._path import forced_path
from echokernels._target import INTERPRETED, KNOWN_TARGETS, assume
from echokernels.attention import paged_decode, prefill
from tests.ops.attention_oracle import Features, attend_ragged, biases, check, values_scale
from tests.ops.paged_cache import make_cache, quantised
from tests.strategies import dtypes, generator, poisoned, randn, seeds
from tests.tolerances import UNIT_ROUNDOFF, assert_close

CODES = [torch.int8, torch.float8_e4m3fn]
codes = st.sampled_from(CODES)
features = st.builds(
    Features,
    causal=st.booleans(),
    window=st.sampled_from([(-1, -1), (-1, -1), (9, -1), (100, 3)]),
    softcap=st.sampled_from([0.0, 0.0, 2.0]),
    alibi=st.sampled_from(["", "", "heads"]),
    sinks=st.booleans(),
)


@pytest.fixture(
    params=["auto", pytest.param("portable", marks=pytest.mark.gpu)], scope="module", autouse=True
)
def path(request):
    """On a GPU the portable kernels are tested with calls that would take the others as well."""
    with nullcontext() if request.param == "auto" else forced_path(request.param):
        yield request.param


def make_case(k_lens, heads, head_dim, page_size, dtype, code, device, gen, q_lens=None, **options):
    """(q, cache of codes, scales)"""
    heads, kv_heads = heads
    q_lens = [1] * len(k_lens) if q_lens is None else q_lens
    q = randn(sum(q_lens), heads, head_dim, dtype=dtype, device=device, gen=gen)
    cache = make_cache(
        k_lens, page_size=page_size, kv_heads=kv_heads, head_dim=head_dim, dtype=torch.float32,
        device=device, gen=gen, **options,
    )  # fmt: skip
    return q, *quantised(cache, code, gen)


@given(
    k_lens=st.lists(st.sampled_from([0, 1, 5, 64, 129, 300]), min_size=1, max_size=4),
    heads=st.sampled_from([(2, 2), (8, 2), (5, 1), (20, 1)]),
    head_dim=st.sampled_from([8, 64, 80, 128, 256]),
    page_size=st.sampled_from([1, 7, 8, 16, 48]),
    dtype=dtypes,
    code=codes,
    head_major=st.booleans(),
    features=features,
    split=st.sampled_from([{}, {"num_splits": 1}, {"num_splits": 3}, {"kv_split_size": 64}]),
    seed=seeds,
)
def test_decode(
    device, k_lens, heads, head_dim, page_size, dtype, code, head_major, features, split, seed
):
    gen = generator(seed)
    q, cache, scales = make_case(
        k_lens, heads, head_dim, page_size, dtype, code, device, gen, head_major=head_major
    )
    extra = biases(features, len(k_lens), heads[0], dtype, device, gen)
    out, lse = paged_attention(
        q, cache.k_cache, cache.v_cache, cache.block_table, cache.seqused_k,
        causal=features.causal, window=features.window, softcap=features.softcap,
        out=poisoned(*q.shape, dtype=dtype, device=device), return_lse=True,
        **scales, **split, **extra,
    )  # fmt: skip
    want = attend_ragged(
        q, cache.keys, cache.values, [1] * len(k_lens), head_dim**-0.5, features, **extra
    )
    check(out, lse, *want, cache.values)


@given(
    lengths=st.lists(
        st.sampled_from([(0, 9), (1, 1), (2, 130), (5, 5), (40, 40), (70, 200), (130, 700)]),
        min_size=1,
        max_size=3,
    ),
    heads=st.sampled_from([(2, 2), (8, 2), (5, 1)]),
    head_dim=st.sampled_from([16, 64, 80, 96, 128]),
    page_size=st.sampled_from([1, 8, 16, 48]),
    dtype=dtypes,
    code=codes,
    features=features,
    seed=seeds,
)
def test_prefill_from_pages(
    device, lengths, heads, head_dim, page_size, dtype, code, features, seed
):
    gen = generator(seed)
    q_lens, k_lens = [q for q, _ in lengths], [k for _, k in lengths]
    q, cache, scales = make_case(
        k_lens, heads, head_dim, page_size, dtype, code, device, gen, q_lens
    )
    boundaries = torch.tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()], device=device)
    extra = biases(features, len(k_lens), heads[0], dtype, device, gen)
    out, lse = flash_attn_varlen(
        q, cache.k_cache, cache.v_cache, boundaries, seqused_k=cache.seqused_k,
        block_table=cache.block_table, max_seqlen_q=max(q_lens), causal=features.causal,
        window=features.window, softcap=features.softcap,
        out=poisoned(*q.shape, dtype=dtype, device=device), return_lse=True, **scales, **extra,
    )  # fmt: skip
    want, want_lse = attend_ragged(
        q, cache.keys, cache.values, q_lens, head_dim**-0.5, features, **extra
    )
    assert_close(out, want, roundings=2, scale=values_scale(cache.values))
    # The kernel for Hopper rounds keys and their scales to fp16, which scores are off by.
    is_rounded = device.type == "cuda" and dtype != torch.float32
    assert_close(lse, want_lse, roundings=2**12 if is_rounded else 4, scale=4.0)


@pytest.mark.parametrize("nats", [0.0, 10.0, 20.0])
@pytest.mark.parametrize("magnitude", [1e-4, 1.0, 1e3])
@pytest.mark.parametrize("op", ["decode", "decode without splits", "prefill"])
def test_weights_do_not_underflow(device, nats, magnitude, op):
    """One key without a value takes nearly all of the softmax; what is left is not lost."""
    k_len, head_dim = 131_072 if device.type == "cuda" else 2048, 64
    if op == "prefill":
        k_len, head_dim = min(k_len, 512 if INTERPRETED else k_len), 128
    gen = generator(0)
    dtype = torch.float16 if INTERPRETED else torch.bfloat16
    keys, values = torch.zeros(2, k_len, 1, head_dim, dtype=torch.float64)
    keys[7] = nats / head_dim**0.5
    values.copy_(magnitude * (0.5 + torch.rand(values.shape, generator=gen)))
    values[7] = 0
    rows = []
    for x in (keys, values):
        scale = (x.abs().amax(-1) / 127).clamp_min(1e-12).float()
        rows.append(((x / scale[..., None]).round().to(torch.int8), scale))
    k_cache, v_cache = (x.view(-1, 16, 1, head_dim).to(device) for x, _ in rows)
    k_scale, v_scale = (scale.view(-1, 16, 1).to(device) for _, scale in rows)
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    table = torch.arange(k_len // 16, dtype=torch.int32, device=device)[None]
    seqused_k = torch.tensor([k_len], device=device)
    q_len = 80 if op == "prefill" else 1
    q = torch.ones(q_len, 1, head_dim, dtype=dtype, device=device)
    if op == "prefill":
        out = flash_attn_varlen(
            q, k_cache, v_cache, torch.tensor([0, q_len], device=device), max_seqlen_q=q_len,
            seqused_k=seqused_k, block_table=table, **scales,
        )  # fmt: skip
    else:
        num_splits = 0 if op == "decode" else 1
        out = paged_attention(
            q, k_cache, v_cache, table, seqused_k, num_splits=num_splits, **scales
        )
    exact_keys, exact_values = (x.double() * scale.double()[..., None] for x, scale in rows)
    weights = torch.softmax(exact_keys[:, 0].sum(-1) * head_dim**-0.5, 0)
    want = weights @ exact_values[:, 0]
    floor = torch.finfo(dtype).smallest_normal
    error = (out[:, 0].cpu().double() - want).abs() / want.clamp_min(floor)
    assert error.max() <= 2 * UNIT_ROUNDOFF[dtype]


@pytest.mark.skipif(INTERPRETED, reason="the interpreter has no bf16")
@pytest.mark.parametrize("magnitude", [1e-8, 1.0, 1e8])
@pytest.mark.parametrize("spread", [0, 6])
def test_prefill_of_any_magnitude(device, magnitude, spread):
    """Queries and values far below and above what fp16 holds, and keys of all sizes in a tile."""
    gen = generator(0)
    q_lens, k_lens = [90, 200], [400, 600]
    q, cache, scales = make_case(
        k_lens, (8, 2), 128, 16, torch.bfloat16, torch.int8, device, gen, q_lens
    )
    q *= magnitude
    for name, rows, size in (
        ("k_scale", cache.keys, 1 / magnitude),
        ("v_scale", cache.values, magnitude),
    ):
        for seq, x in enumerate(rows):
            factor = size * 2.0 ** (spread * (torch.rand(len(x), generator=gen) - 1))
            x *= factor.to(x)[:, None, None]
            slots = torch.arange(len(x), device=device)
            pages = cache.block_table[seq].to(device)[slots // 16].long()
            scales[name][pages, slots % 16] *= factor.to(device, torch.float32)[:, None]
    boundaries = torch.tensor([0, 90, 290], device=device)
    out, lse = flash_attn_varlen(
        q, cache.k_cache, cache.v_cache, boundaries, seqused_k=cache.seqused_k,
        block_table=cache.block_table, max_seqlen_q=200, causal=True, return_lse=True, **scales,
    )  # fmt: skip
    want, want_lse = attend_ragged(q, cache.keys, cache.values, q_lens, 128**-0.5, Features(True))
    assert_close(out, want, roundings=2, scale=values_scale(cache.values))
    assert_close(lse, want_lse, roundings=2**12 if device.type == "cuda" else 4, scale=4.0)


def test_a_token_with_a_nan_scale_hides_nothing(device):
    """A row that held NaN when it was written: whoever sees it knows."""
    gen = generator(0)
    q, cache, scales = make_case([40, 40], (4, 2), 64, 16, torch.float32, torch.int8, device, gen)
    page = int(cache.block_table[1, 0])
    scales["v_scale"][page, 3, 1] = math.nan
    out = paged_attention(
        q, cache.k_cache, cache.v_cache, cache.block_table, cache.seqused_k, **scales
    )
    assert out[0].isfinite().all()
    assert out[1, :2].isfinite().all()
    assert out[1, 2:].isnan().all()
    if device.type == "cpu" and not INTERPRETED:
        return  # the reference multiplies what is hidden by 0
    hidden = paged_attention(
        q, cache.k_cache, cache.v_cache, cache.block_table, cache.seqused_k, window=(30, -1),
        **scales,
    )  # fmt: skip
    assert hidden.isfinite().all()


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("q_len", [1, 40])
def test_scales_of_zero(device, code, q_len):
    """Rows of zeros as another writer may leave them: keys like any other, of no value."""
    gen = generator(0)
    dtype = torch.float16 if INTERPRETED else torch.bfloat16
    q, cache, scales = make_case([200], (4, 2), 128, 16, dtype, code, device, gen, [q_len])
    pages = cache.block_table[0, :5].tolist()
    for name, rows in (("k_scale", cache.keys), ("v_scale", cache.values)):
        scales[name][pages, 3:9] = 0.0
        for i in range(5):
            rows[0][16 * i + 3 : 16 * i + 9] = 0.0
    boundaries = torch.tensor([0, q_len], device=device)
    if q_len == 1:
        out, lse = paged_attention(
            q, cache.k_cache, cache.v_cache, cache.block_table, cache.seqused_k, return_lse=True,
            **scales,
        )  # fmt: skip
    else:
        out, lse = flash_attn_varlen(
            q, cache.k_cache, cache.v_cache, boundaries, seqused_k=cache.seqused_k,
            block_table=cache.block_table, max_seqlen_q=q_len, causal=True, return_lse=True,
            **scales,
        )  # fmt: skip
    want = attend_ragged(q, cache.keys, cache.values, [q_len], 128**-0.5, Features(True))
    check(out, lse, *want, cache.values)


def errors(case):
    q, cache, scales = case
    k, k_scale = cache.k_cache, scales["k_scale"]
    yield ValueError, "k_scale is None, must be a tensor", {"k_scale": None}
    yield ValueError, "v_scale is None, must be a tensor", {"v_scale": None}
    yield ValueError, r"k_scale.shape is .* must be \(", {"k_scale": k_scale[..., :1]}
    yield TypeError, "v_scale.dtype is float64", {"v_scale": k_scale.double()}
    yield TypeError, "v_cache.dtype is float32, must be int8", {"v_cache": k.float()}
    floats = {"k_cache": k.to(q.dtype), "v_cache": k.to(q.dtype)}
    yield ValueError, "k_scale is given, must be None: k_cache.dtype is torch.float32", floats


@pytest.mark.parametrize("index", range(6))
def test_scales_that_do_not_fit_are_refused(device, index):
    case = make_case([40], (4, 2), 64, 16, torch.float32, torch.int8, device, generator(0))
    q, cache, scales = case
    kind, message, wrong = [*errors(case)][index]
    given = {"k_cache": cache.k_cache, "v_cache": cache.v_cache, **scales} | wrong
    with pytest.raises(kind, match=message):
        paged_attention(q, block_table=cache.block_table, seqused_k=cache.seqused_k, **given)


def test_codes_are_only_taken_from_pages(device):
    q = torch.zeros(3, 2, 64, device=device)
    k = torch.zeros(3, 2, 64, dtype=torch.int8, device=device)
    boundaries = torch.tensor([0, 3], device=device)
    with pytest.raises(TypeError, match=r"k.dtype is int8, must be float32"):
        flash_attn_varlen(q, k, k, boundaries, boundaries)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter has FP8")
@pytest.mark.parametrize("op", [paged_decode._launch, prefill._launch])
def test_fp8_needs_a_gpu_that_has_it(op):
    meta = {"device": "meta"}
    q = torch.empty(1, 2, 64, dtype=torch.bfloat16, **meta)
    cache = torch.empty(2, 16, 2, 64, dtype=torch.float8_e4m3fn, **meta)
    index = torch.empty(2, dtype=torch.int32, **meta)
    table, scale = torch.empty(1, 1, dtype=torch.int32, **meta), torch.empty(2, 16, 2, **meta)
    rest = (1.0, True, -1, -1, 0.0, None, None, scale, scale)
    if op is paged_decode._launch:
        args = (q, None, q, cache, cache, table, index[:1], None, 1, *rest, 0, 0, None)
    else:
        args = (q, None, q, cache, cache, index, None, index[:1], table, 1, 1, *rest)
    with (
        assume(KNOWN_TARGETS["sm_80"]),
        pytest.raises(ValueError, match=r"float8_e4m3fn, must be int8 on sm_80"),
    ):
        op(*args)
