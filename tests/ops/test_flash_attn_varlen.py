"""flash_attn_varlen, contiguous and over pages, against the float64 oracle."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echokernels import flash_attn_varlen
from echokernels._path import forced_path
from echokernels._target import INTERPRETED, KNOWN_TARGETS
from echokernels.attention.prefill import _config
from tests.ops.attention_oracle import (
    Features,
    attend_ragged,
    biases,
    check,
    values_scale,
)
from tests.ops.paged_cache import make_cache
from tests.strategies import boundaries, dtypes, generator, poisoned, randn, seeds, strided_randn
from tests.tolerances import assert_close

# (heads, kv_heads): MHA, GQA of 2 and 4, MQA, and groups that are no power of two.
HEADS = [(2, 2), (4, 2), (8, 2), (3, 1), (5, 1), (14, 2)]
# 8: less than a tensor core's tile; 80, 96: padded to 128; 192, 256: wide tiles.
HEAD_DIMS = [8, 16, 64, 80, 96, 128, 192, 256]
# (q_len, k_len): empty, decode, prefill, chunk with a prefix, more queries than keys, no keys at
# all.
LENGTHS = [(0, 0), (0, 5), (1, 1), (1, 37), (3, 3), (17, 17), (5, 70), (33, 66), (9, 4), (4, 0)]
# Of several tiles, whole and with an end, in each of the ways above.
LONG = [(300, 300), (129, 129), (128, 640), (1, 3000), (64, 0), (513, 700), (1000, 90), (70, 1000)]
features = st.builds(
    Features,
    causal=st.booleans(),
    window=st.sampled_from([(-1, -1), (-1, -1), (0, 0), (3, -1), (-1, 2), (16, 4)]),
    softcap=st.sampled_from([0.0, 0.0, 2.0]),
    alibi=st.sampled_from(["", "", "heads", "sequences"]),
    sinks=st.booleans(),
)


@pytest.fixture(
    params=[
        "auto",
        pytest.param("portable", marks=pytest.mark.gpu),
        pytest.param("hopper", marks=pytest.mark.gpu),
    ],
    scope="module",
    autouse=True,
)
def path(request):
    """On a GPU every path is tested with calls that would take another one as well."""
    with forced_path(request.param):
        yield request.param


@given(
    lengths=st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=4),
    heads=st.sampled_from(HEADS),
    head_dim=st.sampled_from(HEAD_DIMS),
    dtype=dtypes,
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
    features=features,
    pad=st.sampled_from([0, 8]),
    seed=seeds,
)
def test_contiguous(device, lengths, heads, head_dim, dtype, index_dtype, features, pad, seed):
    gen = generator(seed)
    heads, kv_heads = heads
    q_lens, k_lens = [q for q, _ in lengths], [k for _, k in lengths]
    q = strided_randn(sum(q_lens), heads, head_dim, dtype=dtype, device=device, gen=gen, pad=pad)
    k = strided_randn(sum(k_lens), kv_heads, head_dim, dtype=dtype, device=device, gen=gen, pad=pad)
    v = strided_randn(sum(k_lens), kv_heads, head_dim, dtype=dtype, device=device, gen=gen, pad=pad)
    extra = biases(features, len(q_lens), heads, dtype, device, gen)
    out, lse = flash_attn_varlen(
        q,
        k,
        v,
        boundaries(q_lens, index_dtype, device),
        boundaries(k_lens, index_dtype, device),
        max(q_lens),
        max(k_lens),
        causal=features.causal,
        window=features.window,
        softcap=features.softcap,
        out=poisoned(*q.shape, dtype=dtype, device=device),
        return_lse=True,
        **extra,
    )
    keys, values = list(k.split(k_lens)), list(v.split(k_lens))
    want = attend_ragged(q, keys, values, q_lens, head_dim**-0.5, features, **extra)
    check(out, lse, *want, values)


@given(
    lengths=st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=4),
    heads=st.sampled_from(HEADS),
    head_dim=st.sampled_from(HEAD_DIMS),
    page_size=st.sampled_from([1, 3, 8, 16, 24, 64]),
    dtype=dtypes,
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
    head_major=st.booleans(),
    features=features,
    seed=seeds,
)
def test_paged(
    device, lengths, heads, head_dim, page_size, dtype, index_dtype, head_major, features, seed
):
    gen = generator(seed)
    heads, kv_heads = heads
    q_lens, k_lens = [q for q, _ in lengths], [k for _, k in lengths]
    q = randn(sum(q_lens), heads, head_dim, dtype=dtype, device=device, gen=gen)
    cache = make_cache(
        k_lens,
        page_size=page_size,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=device,
        gen=gen,
        index_dtype=index_dtype,
        head_major=head_major,
    )
    extra = biases(features, len(q_lens), heads, dtype, device, gen)
    out, lse = flash_attn_varlen(
        q,
        cache.k_cache,
        cache.v_cache,
        boundaries(q_lens, index_dtype, device),
        max_seqlen_q=max(q_lens),
        seqused_k=cache.seqused_k,
        block_table=cache.block_table,
        causal=features.causal,
        window=features.window,
        softcap=features.softcap,
        out=poisoned(*q.shape, dtype=dtype, device=device),
        return_lse=True,
        **extra,
    )
    want = attend_ragged(q, cache.keys, cache.values, q_lens, head_dim**-0.5, features, **extra)
    check(out, lse, *want, cache.values)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
@settings(max_examples=8)
@given(
    lengths=st.lists(st.sampled_from(LONG), min_size=1, max_size=5),
    heads=st.sampled_from([(2, 2), (4, 1), (6, 2)]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    page_size=st.sampled_from([0, 0, 16, 32, 64, 128, 256]),
    head_major=st.booleans(),
    features=features,
    wide=st.booleans(),
    seed=seeds,
)
def test_long_sequences(
    cuda, path, lengths, heads, head_dim, dtype, page_size, head_major, features, wide, seed
):
    if path == "hopper":
        pytest.skip("sequences of this length go there by themselves")
    gen = generator(seed)
    heads, kv_heads = heads
    q_lens, k_lens = [q for q, _ in lengths], [k for _, k in lengths]
    if wide and features.window != (-1, -1):
        features = replace(features, window=(200, features.window[1]))
    q = strided_randn(sum(q_lens), heads, head_dim, dtype=dtype, device=cuda, gen=gen, pad=8)
    # A page a sequence is what packed keys are. Beyond the end, and between, all is NaN.
    cache = make_cache(
        k_lens, page_size=page_size or 128, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype,
        device=cuda, gen=gen, head_major=head_major,
    )  # fmt: skip
    extra = biases(features, len(q_lens), heads, dtype, cuda, gen)
    if page_size:
        keys = (cache.k_cache, cache.v_cache, boundaries(q_lens, torch.int32, cuda))
        extra |= {"seqused_k": cache.seqused_k, "block_table": cache.block_table}
    else:
        gap = poisoned(200, kv_heads, head_dim, dtype=dtype, device=cuda)
        k, v = (
            torch.cat([piece for part in parts for piece in (part, gap)])
            for parts in (cache.keys, cache.values)
        )
        keys = (k, v, boundaries(q_lens, torch.int32, cuda))
        extra |= {
            "cu_seqlens_k": boundaries([n + 200 for n in k_lens], torch.int32, cuda),
            "seqused_k": cache.seqused_k,
        }
    out, lse = flash_attn_varlen(
        q,
        *keys,
        max_seqlen_q=max(q_lens),
        causal=features.causal,
        window=features.window,
        softcap=features.softcap,
        out=poisoned(*q.shape, dtype=dtype, device=cuda),
        return_lse=True,
        **extra,
    )
    of_features = {name: extra[name] for name in ("alibi_slopes", "sinks") if name in extra}
    want = attend_ragged(
        q, cache.keys, cache.values, q_lens, head_dim**-0.5, features, **of_features
    )
    check(out, lse, *want, cache.values)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("growth", ["steady", "spikes", "overflow"])
def test_scores_that_grow_from_tile_to_tile(cuda, head_dim, dtype, causal, growth):
    # Key tiles are taken from the last to the first, so scores that rise towards the first make
    # every tile's maximum a new one, by a factor that weights of the old one could not hold.
    length, gen = 1000, generator(head_dim)
    key = torch.arange(length)
    factors = {
        "steady": torch.linspace(20.0, 0.1, length),
        "spikes": torch.where(key % 100 == 3, 30.0, 0.5),
        "overflow": torch.where(key < 500, 300.0, 0.1),
    }[growth]
    q, k, v = (
        randn(length, heads, head_dim, dtype=dtype, device=cuda, gen=gen) for heads in (4, 2, 2)
    )
    k = (k * factors.to(cuda)[:, None, None]).to(dtype)
    cu_seqlens = boundaries([length], torch.int32, cuda)
    out, lse = flash_attn_varlen(
        q, k, v, cu_seqlens, cu_seqlens, length, length, causal=causal, return_lse=True
    )
    want = attend_ragged(q, [k], [v], [length], head_dim**-0.5, Features(causal=causal))
    check(out, lse, *want, [v])


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("shift", [63, 64, 127, 128, 191])
def test_scores_that_see_nothing_of_a_tile(cuda, head_dim, shift):
    # Query 64 c stands at key 64 c + shift: the key tile that ends there it sees all of, and
    # nothing of the one after, from which its neighbours start.
    gen = generator(shift)
    q = randn(300, 2, head_dim, dtype=torch.bfloat16, device=cuda, gen=gen)
    k, v = (
        randn(300 + shift, 1, head_dim, dtype=torch.bfloat16, device=cuda, gen=gen)
        for _ in range(2)
    )
    lengths = (boundaries([n], torch.int32, cuda) for n in (300, 300 + shift))
    out, lse = flash_attn_varlen(q, k, v, *lengths, 300, causal=True, return_lse=True)
    check(out, lse, *attend_ragged(q, [k], [v], [300], head_dim**-0.5, Features()), [v])


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_key_shows(cuda, bad):
    # In the first key tile, which is taken last and without a mask.
    gen = generator(14)
    q, k, v = (randn(400, 2, 64, dtype=torch.bfloat16, device=cuda, gen=gen) for _ in range(3))
    k[5, 1] = bad
    cu_seqlens = boundaries([400], torch.int32, cuda)
    out = flash_attn_varlen(q, k, v, cu_seqlens, cu_seqlens, 400, 400, causal=True)
    assert out[5:, 1].isnan().all()
    assert out[:, 0].isfinite().all()
    assert out[:5].isfinite().all()


def contiguous_call(device, q_lens, k_lens, heads, kv_heads, head_dim, dtype, gen, **options):
    q = randn(sum(q_lens), heads, head_dim, dtype=dtype, device=device, gen=gen)
    k = randn(sum(k_lens), kv_heads, head_dim, dtype=dtype, device=device, gen=gen)
    v = randn(sum(k_lens), kv_heads, head_dim, dtype=dtype, device=device, gen=gen)
    result = flash_attn_varlen(
        q,
        k,
        v,
        boundaries(q_lens, torch.int32, device),
        boundaries(k_lens, torch.int32, device),
        max(q_lens),
        max(k_lens),
        return_lse=True,
        **options,
    )
    return q, k, v, result


@pytest.mark.parametrize(
    ("q_lens", "k_lens"), [([76, 34, 146], [1, 1, 1]), ([5], [2])], ids=["report", "5-2"]
)
def test_a03_more_queries_than_keys(device, q_lens, k_lens):
    q, k, v, (out, lse) = contiguous_call(
        device, q_lens, k_lens, 1, 1, 32, torch.float16, generator(3), causal=True
    )
    keys, values = list(k.split(k_lens)), list(v.split(k_lens))
    want, want_lse = attend_ragged(q, keys, values, q_lens, 32**-0.5, Features())
    check(out, lse, want, want_lse, values)
    start = 0
    for q_len, k_len in zip(q_lens, k_lens, strict=True):
        blind = slice(start, start + q_len - k_len)
        assert (out[blind] == 0).all()
        assert lse[:, blind].isneginf().all()
        start += q_len


@pytest.mark.parametrize("filler", [float("nan"), float("inf")])
def test_a04_unused_slots_never_leak(device, filler):
    k_lens = [32, 64, 96, 48]

    def run(filler):
        gen = generator(4)
        cache = make_cache(
            k_lens,
            page_size=128,
            kv_heads=8,
            head_dim=64,
            dtype=torch.float16 if INTERPRETED else torch.bfloat16,
            device=device,
            gen=gen,
            filler=filler,
        )
        q = randn(12, 8, 64, dtype=cache.k_cache.dtype, device=device, gen=gen)
        return flash_attn_varlen(
            q,
            cache.k_cache,
            cache.v_cache,
            boundaries([3, 3, 3, 3], torch.int32, device),
            max_seqlen_q=3,
            seqused_k=cache.seqused_k,
            block_table=cache.block_table,
            causal=True,
        )

    assert torch.equal(run(filler), run(0.0))


@pytest.mark.parametrize("head_dim", [80, 96, 192])
def test_a05_nothing_is_written_past_the_head_dim(device, head_dim):
    gen = generator(5)
    q = randn(33, 8, head_dim, dtype=torch.float16, device=device, gen=gen)
    k = randn(33, 2, head_dim, dtype=torch.float16, device=device, gen=gen)
    # Heads stand 256 apart: a store of a padded tile would hit the gap.
    wide = torch.full((34, 8, 256), 7.0, dtype=torch.float16, device=device)
    cu_seqlens = boundaries([33], torch.int32, device)
    flash_attn_varlen(
        q, k, k, cu_seqlens, cu_seqlens, 33, 33, causal=True, out=wide[:33, :, :head_dim]
    )
    assert (wide[:, :, head_dim:] == 7).all()
    assert (wide[33] == 7).all()
    want, _ = attend_ragged(q, [k], [k], [33], head_dim**-0.5, Features())
    assert_close(wide[:33, :, :head_dim], want, roundings=2, scale=values_scale([k]))


@pytest.mark.parametrize(("heads", "kv_heads"), [(40, 8), (28, 4), (9, 3), (12, 1)])
def test_a06_any_group_size(device, heads, kv_heads):
    q, k, v, (out, lse) = contiguous_call(
        device, [5], [11], heads, kv_heads, 16, torch.float16, generator(6), causal=True
    )
    check(out, lse, *attend_ragged(q, [k], [v], [5], 0.25, Features()), [v])


def test_a06_heads_must_be_divisible(device):
    with pytest.raises(ValueError, match="q has 3 heads and k 2: the first must be divisible"):
        contiguous_call(device, [4], [4], 3, 2, 16, torch.float16, generator(6))


def test_a10_softcap_of_huge_scores_is_finite(device):
    # Scores 1000 to 10000 and -10000 capped at 50; softcap comes before the mask.
    scores = torch.tensor([1000.0, 3000, 4400, 5000, 10000, -10000], device=device)
    q = torch.zeros(1, 1, 8, device=device)
    q[..., 0] = 1.0
    k = torch.zeros(6, 1, 8, device=device)
    k[:, 0, 0] = scores
    v = torch.eye(6, 8, device=device)[:, None]
    one, six = (boundaries([n], torch.int32, device) for n in (1, 6))
    out, lse = flash_attn_varlen(
        q, k, v, one, six, 1, 6, softmax_scale=1.0, softcap=50.0, return_lse=True
    )
    want, want_lse = attend_ragged(q, [k], [v], [1], 1.0, Features(causal=False, softcap=50.0))
    check(out, lse, want, want_lse, [v])
    assert abs(lse.item() - 50 - torch.tensor(5.0).log().item()) < 1e-4


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_scale_need_not_be_positive(device, scale):
    q, k, v, (out, lse) = contiguous_call(
        device, [40], [70], 4, 2, 64, torch.float16, generator(13), causal=True,
        softmax_scale=scale,
    )  # fmt: skip
    check(out, lse, *attend_ragged(q, [k], [v], [40], scale, Features()), [v])


def test_fp32_is_exact_and_not_tf32(device):
    # TF32 would be wrong by 1e-3.
    q, k, v, (out, lse) = contiguous_call(
        device, [40], [70], 4, 2, 64, torch.float32, generator(7), causal=True
    )
    want, want_lse = attend_ragged(q, [k], [v], [40], 0.125, Features())
    assert (out.double().cpu() - want).abs().max() < 1e-5
    assert (lse.double().cpu() - want_lse).abs().max() < 1e-5


def test_packed_qkv_slices(device):
    # q, k and v as views of one projection's output.
    gen = generator(8)
    qkv = randn(19, 8, 32, dtype=torch.float16, device=device, gen=gen)
    q, k, v = qkv[:, :4], qkv[:, 4:6], qkv[:, 6:]
    cu_seqlens = boundaries([19], torch.int32, device)
    out = flash_attn_varlen(q, k, v, cu_seqlens, cu_seqlens, 19, 19, causal=True)
    want, _ = attend_ragged(q, [k], [v], [19], 32**-0.5, Features())
    assert_close(out, want, roundings=2, scale=values_scale([v]))


def test_tokens_outside_the_boundaries_are_left_alone(device):
    gen = generator(9)
    q = randn(8, 2, 16, dtype=torch.float16, device=device, gen=gen)
    cu_seqlens = torch.tensor([2, 6], dtype=torch.int32, device=device)
    out = torch.full_like(q, 7.0)
    flash_attn_varlen(q, q, q, cu_seqlens, cu_seqlens, 4, 4, out=out)
    assert (out[:2] == 7).all()
    assert (out[6:] == 7).all()
    want, _ = attend_ragged(q[2:6], [q[2:6]], [q[2:6]], [4], 0.25, Features(causal=False))
    assert_close(out[2:6], want, roundings=2, scale=values_scale([q]))


def test_chunks_equal_the_whole(device):
    # Chunked prefill: the queries of a prompt in two calls see what they see in one.
    gen = generator(10)
    cache = make_cache(
        [50], page_size=16, kv_heads=2, head_dim=32, dtype=torch.float32, device=device, gen=gen
    )
    q = randn(50, 4, 32, dtype=torch.float32, device=device, gen=gen)

    def run(part, k_len):
        return flash_attn_varlen(
            part,
            cache.k_cache,
            cache.v_cache,
            boundaries([len(part)], torch.int32, device),
            seqused_k=torch.tensor([k_len], device=device),
            block_table=cache.block_table,
            causal=True,
        )

    parts = torch.cat([run(q[:23], 23), run(q[23:], 50)])
    assert_close(parts, run(q, 50).double(), roundings=2)


def test_zero_sequences(device):
    empty = torch.empty(0, 2, 16, device=device)
    none = torch.zeros(1, dtype=torch.int32, device=device)
    assert flash_attn_varlen(empty, empty, empty, none, none, 0, 0).shape == (0, 2, 16)


def test_opcheck(device):
    gen = generator(11)
    qkv = randn(9, 8, 16, dtype=torch.float32, device=device, gen=gen)
    out = torch.empty(9, 4, 16, device=device)
    lse = torch.empty(4, 9, device=device)
    cu_seqlens = boundaries([4, 5], torch.int32, device)
    args = (
        out, lse, qkv[:, :4], qkv[:, 4:6], qkv[:, 6:], cu_seqlens, cu_seqlens, None, None,
        5, 5, 0.25, True, -1, -1, 0.0, None, None, None, None,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.echo.flash_attn_varlen.default, args)


def bad_arguments():
    yield {"q": torch.zeros(4, 2, 12)}, ValueError, "must end in a head_dim that is a multiple of 8"
    yield {"q": torch.zeros(4, 2, 264)}, ValueError, "a multiple of 8 up to 256"
    yield {"q": torch.zeros(4, 2, 16).double()}, TypeError, "q.dtype is float64, must be float16"
    yield {"k": torch.zeros(4, 2, 16).half()}, TypeError, "k.dtype is float16, must be float32"
    yield {"k": torch.zeros(4, 2, 8)}, ValueError, "k.shape is (4, 2, 8), must be (4, 2, 16)"
    yield {"k": torch.zeros(4, 16, 2).mT}, ValueError, "must be 1 in the last dimension"
    yield (
        {"cu_seqlens_q": torch.zeros(2)},
        TypeError,
        "cu_seqlens_q.dtype is float32, must be int32, int64",
    )
    yield {"cu_seqlens_k": None}, ValueError, "cu_seqlens_k is None, must be given"
    yield {"window": (-2, 0)}, ValueError, "window_left is -2, must be at least -1"
    yield {"softcap": float("nan")}, ValueError, "softcap is nan, must be at least 0.0"
    yield {"softmax_scale": float("inf")}, ValueError, "softmax_scale is inf, must be finite"
    yield {"sinks": torch.zeros(3)}, ValueError, "sinks.shape is (3,), must be (2)"
    yield {"sinks": torch.zeros(2).int()}, TypeError, "sinks.dtype is int32, must be float16"
    slopes = torch.zeros(3, 2)
    yield {"alibi_slopes": slopes}, ValueError, "alibi_slopes.shape is (3, 2), must be (1, 2)"
    yield {"alibi_slopes": slopes.half()[0]}, TypeError, "alibi_slopes.dtype is float16, must be"


@pytest.mark.parametrize(("change", "error", "message"), list(bad_arguments()))
def test_bad_arguments(change, error, message):
    zeros = torch.zeros(4, 2, 16)
    cu_seqlens = torch.tensor([0, 4], dtype=torch.int32)
    good = {
        "q": zeros,
        "k": zeros,
        "v": zeros,
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_k": cu_seqlens,
    }
    flash_attn_varlen(**good)
    with pytest.raises(error) as caught:
        flash_attn_varlen(**{**good, **change})
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_scales_of_keys_that_are_not_codes_are_refused(name):
    zeros, cu_seqlens = torch.zeros(4, 2, 16), torch.tensor([0, 4], dtype=torch.int32)
    options = dict.fromkeys(("alibi_slopes", "sinks", "k_scale", "v_scale")) | {name: zeros[0, 0]}
    with pytest.raises(ValueError, match=f"{name} is given, must be None: k.dtype is .* no scales"):
        torch.ops.echo.flash_attn_varlen(
            zeros, None, zeros, zeros, zeros, cu_seqlens, cu_seqlens, None, None, 4, 4, 1.0, True,
            -1, -1, 0.0, *options.values(),
        )  # fmt: skip


def test_gradients_are_refused():
    zeros, cu_seqlens = torch.zeros(4, 2, 16), torch.tensor([0, 4], dtype=torch.int32)
    with (
        torch.enable_grad(),
        pytest.raises(ValueError, match=r"flash_attn_varlen: k\.requires_grad is True"),
    ):
        flash_attn_varlen(zeros, zeros.clone().requires_grad_(), zeros, cu_seqlens, cu_seqlens)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("cu_seqlens_q", [0, 5], "cu_seqlens_q holds 0..5, must lie in [0, 5)"),
        ("max_seqlen_q", 3, "the lengths of cu_seqlens_q holds 4..4, must lie in [0, 4)"),
        ("cu_seqlens_k", [4, 0], "the lengths of cu_seqlens_k holds -4..-4, must lie in [0, 5)"),
        ("seqused_k", [5], "cu_seqlens_k + seqused_k holds 5..5, must lie in [0, 5)"),
    ],
)
@pytest.mark.usefixtures("debug_checks")
def test_debug_mode_reads_the_indices(device, name, value, message):
    zeros = torch.zeros(4, 2, 16, device=device)
    cu_seqlens = boundaries([4], torch.int32, device)
    good = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
    bad = torch.tensor(value, device=device) if isinstance(value, list) else value
    flash_attn_varlen(zeros, zeros, zeros, **good)
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the message is compared as it is)
        flash_attn_varlen(zeros, zeros, zeros, **{**good, name: bad})
    assert message in str(caught.value)


def test_config_follows_rows_and_target():
    sm_90, gfx = KNOWN_TARGETS["sm_90"], KNOWN_TARGETS["gfx942"]
    assert _config(128, 2, 4, False, sm_90).block_m == 16  # one token of a group of four
    assert _config(128, 2, 64, False, sm_90).block_m == 64
    assert _config(128, 2, 4096, False, sm_90).block_m == 128
    assert _config(128, 2, 4096, True, sm_90).block_n == 128
    assert _config(256, 2, 4096, False, sm_90).num_stages == 4
    # 64 KB of shared memory hold two tiles of K and V, not three.
    assert _config(128, 2, 4096, False, gfx).num_stages == 2


@pytest.mark.gpu
def test_a22_more_sequences_than_a_grid_dimension(cuda):
    q = torch.randn(70_000, 1, 16, device=cuda, dtype=torch.float16)
    cu_seqlens = torch.arange(70_001, device=cuda, dtype=torch.int32)
    assert torch.equal(flash_attn_varlen(q, q, q, cu_seqlens, cu_seqlens, 1, 1, causal=True), q)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_long_ragged_batch_in_bf16(cuda, head_dim):
    gen = generator(12)
    q_lens, k_lens = [300, 129, 1, 70], [300, 500, 333, 70]
    q, k, v, (out, lse) = contiguous_call(
        cuda, q_lens, k_lens, 4, 2, head_dim, torch.bfloat16, gen, causal=True
    )
    keys, values = list(k.split(k_lens)), list(v.split(k_lens))
    check(out, lse, *attend_ragged(q, keys, values, q_lens, head_dim**-0.5, Features()), values)


@pytest.mark.gpu
def test_compiled_equals_eager(cuda):
    def call(q, k, v, cu_seqlens):
        return flash_attn_varlen(
            q, k, v, cu_seqlens, cu_seqlens, q.shape[0], k.shape[0], causal=True
        )

    compiled = torch.compile(call, fullgraph=True, dynamic=True)
    for tokens in (33, 50):
        # A slice of a packed projection: the strides must survive tracing (A21).
        qkv = torch.randn(tokens, 6, 64, device=cuda, dtype=torch.bfloat16)
        args = (qkv[:, :4], qkv[:, 4:5], qkv[:, 5:], boundaries([tokens - 9, 9], torch.int32, cuda))
        assert torch.equal(compiled(*args), call(*args))
