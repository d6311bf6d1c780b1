"""paged_attention against the float64 oracle, and against itself: splits, pages and batches must
not matter."""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echokernels import attention_workspace_size, paged_attention, split_plan
from echokernels._path import forced_path
from echokernels._target import INTERPRETED, KNOWN_TARGETS
from echokernels.attention._decode_config import _config
from echokernels.attention._sharing import Sharing, forced_sharing
from tests.ops.attention_oracle import (
    Features,
    attend_ragged,
    biases,
    check,
    values_scale,
)
from tests.ops.paged_cache import make_cache
from tests.strategies import dtypes, generator, poisoned, randn, seeds
from tests.tolerances import assert_close

HEADS = [(2, 2), (8, 2), (3, 1), (5, 1), (14, 2), (20, 1)]
HEAD_DIMS = [8, 64, 80, 96, 128, 256]
# 0: a padded row; 1: the first token; 129 and 300: more than one tile and one default chunk.
K_LENS = st.lists(st.sampled_from([0, 1, 5, 31, 64, 129, 300]), min_size=1, max_size=4)
features = st.builds(
    Features,
    causal=st.booleans(),
    window=st.sampled_from([(-1, -1), (-1, -1), (0, 0), (9, -1), (100, 3)]),
    softcap=st.sampled_from([0.0, 0.0, 2.0]),
    alibi=st.sampled_from(["", "", "heads", "sequences"]),
    sinks=st.booleans(),
)
splits = st.sampled_from(
    [
        {"num_splits": 0},
        {"num_splits": 1},
        {"num_splits": 3},
        {"num_splits": 16},  # more splits than most sequences have tiles
        {"kv_split_size": 64},
        {"kv_split_size": 1},
    ]
)
BF16 = torch.float16 if INTERPRETED else torch.bfloat16


@pytest.fixture(
    params=["auto", pytest.param("portable", marks=pytest.mark.gpu)], scope="module", autouse=True
)
def path(request):
    """On a GPU the portable kernels are tested with calls that would take the others as well."""
    # Where a path is forced no call is replayed.
    with nullcontext() if request.param == "auto" else forced_path(request.param):
        yield request.param


@given(
    k_lens=K_LENS,
    heads=st.sampled_from(HEADS),
    head_dim=st.sampled_from(HEAD_DIMS),
    page_size=st.sampled_from([1, 7, 16, 48]),
    dtype=dtypes,
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
    head_major=st.booleans(),
    features=features,
    split=splits,
    seed=seeds,
)
def test_one_query(
    device,
    k_lens,
    heads,
    head_dim,
    page_size,
    dtype,
    index_dtype,
    head_major,
    features,
    split,
    seed,
):
    gen = generator(seed)
    heads, kv_heads = heads
    q = randn(len(k_lens), heads, head_dim, dtype=dtype, device=device, gen=gen)
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
    extra = biases(features, len(k_lens), heads, dtype, device, gen)
    out, lse = paged_attention(
        q,
        cache.k_cache,
        cache.v_cache,
        cache.block_table,
        cache.seqused_k,
        causal=features.causal,
        window=features.window,
        softcap=features.softcap,
        out=poisoned(*q.shape, dtype=dtype, device=device),
        return_lse=True,
        **split,
        **extra,
    )
    q_lens = [1] * len(k_lens)
    want = attend_ragged(q, cache.keys, cache.values, q_lens, head_dim**-0.5, features, **extra)
    check(out, lse, *want, cache.values)


@given(
    lengths=st.lists(
        st.sampled_from([(0, 0), (0, 9), (1, 1), (2, 130), (5, 5), (16, 40), (3, 200), (7, 4)]),
        min_size=1,
        max_size=4,
    ),
    heads=st.sampled_from(HEADS),
    head_dim=st.sampled_from([16, 64, 96]),
    dtype=dtypes,
    features=features,
    split=splits,
    seed=seeds,
)
def test_several_queries(device, lengths, heads, head_dim, dtype, features, split, seed):
    gen = generator(seed)
    heads, kv_heads = heads
    q_lens, k_lens = [q for q, _ in lengths], [k for _, k in lengths]
    q = randn(sum(q_lens), heads, head_dim, dtype=dtype, device=device, gen=gen)
    cache = make_cache(
        k_lens,
        page_size=16,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=device,
        gen=gen,
    )
    cu_seqlens_q = torch.tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()], device=device)
    extra = biases(features, len(k_lens), heads, dtype, device, gen)
    out, lse = paged_attention(
        q,
        cache.k_cache,
        cache.v_cache,
        cache.block_table,
        cache.seqused_k,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max(1, *q_lens),
        causal=features.causal,
        window=features.window,
        softcap=features.softcap,
        out=poisoned(*q.shape, dtype=dtype, device=device),
        return_lse=True,
        **split,
        **extra,
    )
    want = attend_ragged(q, cache.keys, cache.values, q_lens, head_dim**-0.5, features, **extra)
    check(out, lse, *want, cache.values)


def small_case(device, k_lens, *, seed=0, page_size=16, dtype=torch.float32, **options):
    gen = generator(seed)
    q = randn(len(k_lens), 4, 64, dtype=dtype, device=device, gen=gen)
    cache = make_cache(
        k_lens,
        page_size=page_size,
        kv_heads=2,
        head_dim=64,
        dtype=dtype,
        device=device,
        gen=gen,
        **options,
    )
    return q, cache


def decode(q, cache, **options):
    return paged_attention(
        q,
        cache.k_cache,
        cache.v_cache,
        cache.block_table,
        cache.seqused_k,
        return_lse=True,
        **options,
    )


def test_a02_empty_splits_do_not_matter(device):
    # 5 keys in 16 splits: 15 hold nothing, and their partials hold NaN.
    q, cache = small_case(device, [5, 0])
    size = 16 * 2 * 4 * 65 * 4
    workspace = poisoned(size // 4, dtype=torch.float32, device=device)
    out, lse = decode(q, cache, num_splits=16, workspace=workspace)
    want, want_lse = decode(q, cache, num_splits=1)
    assert_close(out, want.double())
    assert_close(lse, want_lse.double())
    assert (out[1] == 0).all()
    assert lse[:, 1].isneginf().all()


@pytest.mark.parametrize("filler", [float("nan"), float("inf")])
@pytest.mark.parametrize("num_splits", [0, 1, 4])
def test_a04_unused_slots_never_leak(device, filler, num_splits):
    def run(filler):
        q, cache = small_case(device, [32, 64, 96, 48], page_size=128, dtype=BF16, filler=filler)
        return decode(q, cache, num_splits=num_splits)[0]

    assert torch.equal(run(filler), run(0.0))


@pytest.mark.parametrize("num_splits", [0, 1, 3])
@pytest.mark.parametrize("head_dim", [80, 96, 192])
def test_a05_nothing_is_written_past_the_head_dim(device, head_dim, num_splits):
    gen = generator(5)
    q = randn(2, 8, head_dim, dtype=torch.float16, device=device, gen=gen)
    cache = make_cache(
        [33, 70],
        page_size=16,
        kv_heads=2,
        head_dim=head_dim,
        dtype=torch.float16,
        device=device,
        gen=gen,
    )
    # Heads stand 256 apart: a store of a padded tile would hit the gap.
    wide = torch.full((3, 8, 256), 7.0, dtype=torch.float16, device=device)
    decode(q, cache, num_splits=num_splits, out=wide[:2, :, :head_dim])
    assert (wide[:, :, head_dim:] == 7).all()
    assert (wide[2] == 7).all()
    want, _ = attend_ragged(q, cache.keys, cache.values, [1, 1], head_dim**-0.5, Features())
    assert_close(wide[:2, :, :head_dim], want, roundings=2, scale=values_scale(cache.values))


@pytest.mark.parametrize("page_size", [1, 8, 24, 48, 256])
def test_a07_any_page_size(device, page_size):
    # 2 pages and one token; 256 also past 4,096 tokens, where another kernel's page arithmetic
    # broke (flashinfer#4347).
    k_lens = [page_size * 2 + 1, 4_099 if page_size == 256 else 3]
    q, cache = small_case(device, k_lens, page_size=page_size)
    out, lse = decode(q, cache)
    check(
        out,
        lse,
        *attend_ragged(q, cache.keys, cache.values, [1, 1], 0.125, Features()),
        cache.values,
    )


def test_a13_many_query_heads_on_one_kv_head(device):
    gen = generator(13)
    q = randn(2, 128, 64, dtype=torch.float16, device=device, gen=gen)
    cache = make_cache(
        [40, 7], page_size=16, kv_heads=1, head_dim=64, dtype=torch.float16, device=device, gen=gen
    )
    out, lse = decode(q, cache)
    check(
        out,
        lse,
        *attend_ragged(q, cache.keys, cache.values, [1, 1], 0.125, Features()),
        cache.values,
    )


def test_a13_too_wide_heads_are_refused(device):
    q, cache = torch.zeros(1, 2, 512, device=device), torch.zeros(2, 16, 1, 512, device=device)
    table = torch.zeros(1, 2, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="a multiple of 8 up to 256"):
        paged_attention(q, cache, cache, table, table[:, 0].contiguous())


@given(k_lens=K_LENS, num_splits=st.integers(2, 20), seed=seeds)
def test_split_count_does_not_matter(device, k_lens, num_splits, seed):
    # Partials are fp32, so the results agree to fp32 even for half-precision inputs' exact weights.
    q, cache = small_case(device, k_lens, seed=seed)
    out, lse = decode(q, cache, num_splits=num_splits)
    want, want_lse = decode(q, cache, num_splits=1)
    scale = values_scale(cache.values)
    assert_close(out, want.double(), scale=scale)
    assert_close(lse, want_lse.double(), scale=4.0)


def test_more_partials_than_are_merged_at_once(device):
    # 25 chunks of one tile of keys; the later a key, the larger its score: the max keeps growing.
    q, cache = small_case(device, [800, 40])
    q.fill_(1.0)
    ramp = torch.linspace(0.0, 0.5, 800, device=device)
    for i in range(800):
        page = int(cache.block_table[0, i // 16])
        cache.k_cache[page, i % 16] = cache.keys[0][i] = ramp[i]
    out, lse = decode(q, cache, num_splits=25)
    want = attend_ragged(q, cache.keys, cache.values, [1, 1], 0.125, Features())
    check(out, lse, *want, cache.values)


@pytest.mark.parametrize("k_lens", [[4500], [100, 3000, 70, 2500]])
def test_many_pieces_merge_in_groups(device, k_lens):
    gen = generator(0)
    q = randn(len(k_lens), 3, 64, dtype=BF16, device=device, gen=gen)
    cache = make_cache(
        k_lens, page_size=16, kv_heads=1, head_dim=64, dtype=BF16, device=device, gen=gen
    )
    sinks = randn(3, dtype=BF16, device=device, gen=gen)
    with forced_sharing(Sharing(64, 8)):
        plan = split_plan(k_lens, 3, 1, 64, dtype=BF16, device=device)
        assert max(plan) > 32  # pieces that are merged without groups
        out, lse = decode(q, cache, sinks=sinks)
    want = attend_ragged(
        q, cache.keys, cache.values, [1] * len(k_lens), 0.125, Features(), sinks=sinks
    )
    check(out, lse, *want, cache.values)


@given(k_lens=K_LENS, seed=seeds)
def test_page_order_does_not_matter(device, k_lens, seed):
    q, cache = small_case(device, k_lens, seed=seed)
    order = torch.randperm(len(cache.k_cache), generator=generator(seed))
    moved = torch.empty_like(order)
    moved[order] = torch.arange(len(order))
    out, lse = paged_attention(
        q,
        cache.k_cache[order],
        cache.v_cache[order],
        moved[cache.block_table.cpu()].to(device),
        cache.seqused_k,
        return_lse=True,
    )
    want, want_lse = decode(q, cache)
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)


@given(k_lens=K_LENS, kv_split_size=st.sampled_from([1, 64, 100]), seed=seeds)
def test_kv_split_size_makes_results_independent_of_the_batch(device, k_lens, kv_split_size, seed):
    q, cache = small_case(device, k_lens, seed=seed, dtype=torch.float16)
    out, lse = decode(q, cache, kv_split_size=kv_split_size)
    for seq, k_len in enumerate(k_lens):
        alone, alone_lse = paged_attention(
            q[seq : seq + 1],
            cache.k_cache,
            cache.v_cache,
            # As wide as this sequence needs: alone it may take the kernel that does not split.
            cache.block_table[seq : seq + 1, : -(-k_len // 16)].contiguous(),
            cache.seqused_k[seq : seq + 1],
            kv_split_size=kv_split_size,
            return_lse=True,
        )
        assert torch.equal(out[seq], alone[0])
        assert torch.equal(lse[:, seq], alone_lse[:, 0])


def test_kv_split_size_ignores_how_long_the_others_are(device):
    # Beside a long sequence the short ones take the kernel that splits, and their one partial is
    # merged; alone they take the one that does not. Their LSE must not even be rounded otherwise.
    q, cache = small_case(device, [*range(1, 33), 300], dtype=torch.float16)
    out, lse = decode(q, cache, kv_split_size=64)
    short, short_lse = paged_attention(
        q[:32],
        cache.k_cache,
        cache.v_cache,
        cache.block_table[:32, :2].contiguous(),
        cache.seqused_k[:32],
        kv_split_size=64,
        return_lse=True,
    )
    assert torch.equal(out[:32], short)
    assert torch.equal(lse[:, :32], short_lse)


@pytest.mark.parametrize("num_splits", [0, 1, 5])
def test_the_promised_workspace_is_enough(device, num_splits):
    q, cache = small_case(device, [300, 9, 0, 64])
    size = attention_workspace_size(4, 4, 4, 2, 64, num_splits, device)
    workspace = torch.empty(size, dtype=torch.uint8, device=device)
    out, _ = decode(q, cache, num_splits=num_splits, workspace=workspace)
    assert torch.equal(out, decode(q, cache, num_splits=num_splits)[0])


def test_a_small_workspace_is_refused(device):
    if device.type == "cpu" and not INTERPRETED:
        pytest.skip("the reference needs no workspace")
    q, cache = small_case(device, [300])
    workspace = torch.empty(100, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match="workspace has 100 bytes, must have at least 5200"):
        decode(q, cache, num_splits=5, workspace=workspace)


def test_zero_sequences(device):
    q, cache = small_case(device, [])
    assert decode(q, cache)[0].shape == (0, 4, 64)


def test_a_table_without_columns(device):
    q, cache = small_case(device, [0, 0], spare_columns=0)
    out, lse = decode(q, cache)
    assert (out == 0).all()
    assert lse.isneginf().all()


def test_opcheck(device):
    q, cache = small_case(device, [33, 2], head_major=True)
    workspace = torch.empty(3 * 2 * 4 * 65 * 4, dtype=torch.uint8, device=device)
    args = (
        torch.empty_like(q), torch.empty(4, 2, device=device), q, cache.k_cache, cache.v_cache,
        cache.block_table, cache.seqused_k, None, 1, 0.125, True, -1, -1, 0.0,
        None, None, None, None, 3, 0, workspace,
    )  # fmt: skip
    # The workspace is scratch: the reference leaves it alone and the kernels fill it, both allowed
    # by the schema.
    torch.library.opcheck(torch.ops.echo.paged_attention.default, args)


def bad_arguments():
    yield {"q": torch.zeros(3, 2, 16)}, ValueError, "must start with 2, one query a sequence"
    yield (
        {"k_cache": torch.zeros(4, 16, 1, 8)},
        ValueError,
        "k_cache.shape is (4, 16, 1, 8), must be",
    )
    yield {"k_cache": torch.zeros(4, 0, 1, 16)}, ValueError, "must have a page size of at least 1"
    yield (
        {"v_cache": torch.zeros(4, 16, 1, 16).half()},
        TypeError,
        "v_cache.dtype is float16, must be",
    )
    yield {"block_table": torch.zeros(2, 2)}, TypeError, "block_table.dtype is float32"
    yield (
        {"block_table": torch.zeros(3, 2).int()},
        ValueError,
        "block_table.shape is (3, 2), must be (2, *)",
    )
    yield {"max_seqlen_q": 2}, ValueError, "max_seqlen_q is 2, must be from 1 to 1"
    yield (
        {"cu_seqlens_q": torch.tensor([0, 1, 2]), "max_seqlen_q": 17},
        ValueError,
        "max_seqlen_q is 17, must be from 1 to 16",
    )
    yield {"num_splits": -1}, ValueError, "num_splits is -1, must be at least 0"
    yield {"kv_split_size": -1}, ValueError, "kv_split_size is -1, must be at least 0"


@pytest.mark.parametrize(("change", "error", "message"), list(bad_arguments()))
def test_bad_arguments(change, error, message):
    good = {
        "q": torch.zeros(2, 2, 16),
        "k_cache": torch.zeros(4, 16, 1, 16),
        "v_cache": torch.zeros(4, 16, 1, 16),
        "block_table": torch.zeros(2, 2, dtype=torch.int32),
        "seqused_k": torch.ones(2, dtype=torch.int32),
    }
    paged_attention(**good)
    with pytest.raises(error) as caught:
        paged_attention(**{**good, **change})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seqused_k": torch.tensor([33, 1])}, "seqused_k holds 1..33, must lie in [0, 33)"),
        (
            {"block_table": torch.tensor([[4, 0], [0, 0]])},
            "block_table holds 0..4, must lie in [0, 4)",
        ),
        (
            {"cu_seqlens_q": torch.tensor([0, 2, 1]), "max_seqlen_q": 2},
            "the lengths of cu_seqlens_q holds -1..2, must lie in [0, 3)",
        ),
    ],
)
@pytest.mark.usefixtures("debug_checks")
def test_debug_mode_reads_the_indices(device, change, message):
    good = {
        "q": torch.zeros(2, 2, 16),
        "k_cache": torch.zeros(4, 16, 1, 16),
        "v_cache": torch.zeros(4, 16, 1, 16),
        # The last entry is beyond its sequence, so it may be anything.
        "block_table": torch.tensor([[3, 0], [0, 99]]),
        "seqused_k": torch.tensor([32, 1]),
    }
    paged_attention(**{name: tensor.to(device) for name, tensor in good.items()})
    bad = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in {**good, **change}.items()
    }
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the message is compared as it is)
        paged_attention(**bad)
    assert message in str(caught.value)


def test_config_follows_rows_and_target():
    sm_90 = KNOWN_TARGETS["sm_90"]
    assert _config(128, 2, 4, sm_90).block_m == 16
    assert _config(128, 2, 128, sm_90).block_m == 64
    assert _config(256, 2, 4, KNOWN_TARGETS["gfx942"]).num_stages == 1


@pytest.mark.gpu
def test_a01_page_offsets_beyond_31_bits(cuda):
    # Page 131,072 of 16 x 8 x 128 elements is the first whose offset reaches 2^31.
    num_pages, last = 131_200, [131_072, 131_199]
    q = torch.randn(1, 32, 128, device=cuda, dtype=torch.bfloat16)
    k_cache = torch.empty(num_pages, 16, 8, 128, device=cuda, dtype=torch.bfloat16)
    v_cache = torch.empty_like(k_cache)
    for cache in (k_cache, v_cache):
        cache[last] = torch.randn(2, 16, 8, 128, device=cuda, dtype=torch.bfloat16)
        cache[:2] = cache[last]
    lens = torch.tensor([30], device=cuda, dtype=torch.int32)
    far, near = (torch.tensor([t], device=cuda, dtype=torch.int32) for t in (last, [0, 1]))
    assert torch.equal(
        paged_attention(q, k_cache, v_cache, far, lens),
        paged_attention(q, k_cache, v_cache, near, lens),
    )


@pytest.mark.gpu
def test_a22_more_sequences_than_a_grid_dimension(cuda):
    q = torch.randn(70_000, 1, 16, device=cuda, dtype=torch.float16)
    table = torch.arange(70_000, device=cuda, dtype=torch.int32)[:, None]
    lens = torch.ones(70_000, device=cuda, dtype=torch.int32)
    assert torch.equal(paged_attention(q, q[:, None], q[:, None], table, lens), q)


@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", [0, 1, 7])
@pytest.mark.parametrize("page_size", [16, 1])
def test_a24_one_graph_serves_any_lengths(cuda, num_splits, page_size):
    gen = generator(24)
    q = randn(4, 8, 128, dtype=torch.bfloat16, device=cuda, gen=gen)
    pages = 131_072 // page_size
    shape = (4 * pages, page_size, 2, 128)
    k_cache = torch.randn(*shape, device=cuda, dtype=torch.bfloat16)
    v_cache = torch.randn(*shape, device=cuda, dtype=torch.bfloat16)
    table = torch.randperm(4 * pages, device=cuda).view(4, pages).int()
    lens = torch.ones(4, device=cuda, dtype=torch.int32)
    out = torch.empty_like(q)

    def call(out):
        return paged_attention(
            q, k_cache, v_cache, table, lens, num_splits=num_splits, out=out, return_lse=True
        )

    call(out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, lse = call(out)
    for new in ([17, 129, 4_097, 0], [0] * 4, [1] * 4, [131_072, 3, 64, 2_000], [0, 0, 0, 131_072]):
        lens.copy_(torch.tensor(new, device=cuda, dtype=torch.int32))
        graph.replay()
        want, want_lse = call(torch.empty_like(q))
        assert torch.equal(out, want)
        assert torch.equal(lse, want_lse)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_split_size", [0, 256])
def test_long_ragged_batch_in_bf16(cuda, kv_split_size):
    gen = generator(25)
    k_lens = [1, 5_000, 0, 777, 2_048]
    q = randn(5, 16, 128, dtype=torch.bfloat16, device=cuda, gen=gen)
    cache = make_cache(
        k_lens, page_size=16, kv_heads=2, head_dim=128, dtype=torch.bfloat16, device=cuda, gen=gen
    )
    out, lse = decode(q, cache, kv_split_size=kv_split_size)
    want = attend_ragged(q, cache.keys, cache.values, [1] * 5, 128**-0.5, Features())
    check(out, lse, *want, cache.values)


@pytest.mark.gpu
def test_compiled_equals_eager(cuda):
    def call(q, cache, table, lens):
        return paged_attention(q, cache, cache, table, lens)

    compiled = torch.compile(call, fullgraph=True, dynamic=True)
    cache = torch.randn(64, 16, 2, 64, device=cuda, dtype=torch.bfloat16)
    for num_seqs in (3, 5):
        q = torch.randn(num_seqs, 8, 64, device=cuda, dtype=torch.bfloat16)
        table = torch.randint(0, 64, (num_seqs, 8), device=cuda)
        lens = torch.randint(1, 128, (num_seqs,), device=cuda)
        assert torch.equal(compiled(q, cache, table, lens), call(q, cache, table, lens))
