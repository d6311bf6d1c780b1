"""The decode for Hopper beside the portable one, however its work is shared out."""

from contextlib import nullcontext
from typing import NamedTuple
from unittest import mock

import pytest
import torch

from echokernels import _counters, paged_attention
from echokernels._path import forced_path
from echokernels.attention import decode_hopper
from echokernels.attention._sharing import forced_sharing
from tests.strategies import poisoned
from tests.tolerances import assert_close

pytestmark = pytest.mark.gpu

BATCHES = {
    "one": [1000],
    "long": [33_000],
    "ragged": [0, 5, 128, 129, 1000, 4000, 17, 0],
    "alike": [1500] * 64,
    "many": [3000, 77, 0, 500] * 64,
}


@pytest.fixture(autouse=True)
def _needs_hopper(cuda):
    if torch.cuda.get_device_capability(cuda)[0] != 9:
        pytest.skip("the kernel is for sm_90")
    torch.manual_seed(0)


class Case(NamedTuple):
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    seqused_k: torch.Tensor


def make_case(
    device, k_lens, *, heads=8, kv_heads=2, head_dim=128, page_size=16, queries=1, head_major=False,
    dtype=torch.bfloat16,
):  # fmt: skip
    """Pages in random order; NaN in those of nobody and behind the end of each sequence."""
    counts = [-(-length // page_size) for length in k_lens]
    total = sum(counts)
    shape = (total + 1, page_size, kv_heads, head_dim)
    if head_major:
        shape = (total + 1, kv_heads, page_size, head_dim)
    caches = [torch.randn(shape, device=device, dtype=dtype) for _ in range(2)]
    k_cache, v_cache = (cache.transpose(1, 2) if head_major else cache for cache in caches)
    table = torch.zeros(len(k_lens), max(counts) + 1, dtype=torch.int32, device=device)
    pages = (torch.randperm(total, device=device).int() + 1).split(counts)
    for cache in (k_cache, v_cache):
        cache[0] = float("nan")
    for seq, (length, own) in enumerate(zip(k_lens, pages, strict=True)):
        table[seq, : len(own)] = own
        if length % page_size:
            for cache in (k_cache, v_cache):
                cache[own[-1], length % page_size :] = float("nan")
    q = torch.randn(len(k_lens) * queries, heads, head_dim, device=device, dtype=dtype)
    return Case(q, k_cache, v_cache, table, torch.tensor(k_lens, device=device))


def decode(case, **options):
    out = poisoned(*case.q.shape, dtype=case.q.dtype, device=case.q.device)
    return paged_attention(*case, out=out, return_lse=True, **options)


def decode_by(path, case, **options):
    with (
        forced_path(path),
        mock.patch.object(
            decode_hopper, "launch_hopper", side_effect=decode_hopper.launch_hopper
        ) as launch,
    ):
        results = decode(case, **options)
    assert launch.call_count == (path == "hopper")
    return results


def assert_same(case, sharing=None, **options):
    with nullcontext() if sharing is None else forced_sharing(sharing):
        out, lse = decode_by("hopper", case, **options)
    want, want_lse = decode_by("portable", case, **options)
    # Both round weights and results.
    assert_close(out, want.double(), roundings=4, scale=1.0)
    assert_close(lse, want_lse.double(), roundings=8, scale=4.0)


@pytest.mark.parametrize("sharing", decode_hopper.SHARINGS, ids=str)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (8, 1), (6, 6)])
def test_shares_of_any_batch(cuda, sharing, batch, heads, kv_heads):
    assert_same(make_case(cuda, BATCHES[batch], heads=heads, kv_heads=kv_heads), sharing)


@pytest.mark.parametrize("page_size", [1, 3, 8, 32, 48, 64, 192, 256])
@pytest.mark.parametrize("sharing", decode_hopper.SHARINGS, ids=str)
def test_pages_of_other_sizes(cuda, sharing, page_size):
    case = make_case(
        cuda, [3000, 77, 5000], head_dim=96, page_size=page_size, head_major=True,
        dtype=torch.float16,
    )  # fmt: skip
    assert_same(case, sharing, window=(1500, -1), sinks=torch.randn(8, device=cuda).half())


@pytest.mark.parametrize("codes", [False, True], ids=["bf16", "int8"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("page_size", [1, 16])
def test_runs_agree(cuda, codes, head_dim, page_size):
    """Bit for bit, with loads and products of two programs of an SM in each other's way."""
    lens = [1024] * 96 + torch.randint(1, 4096, (96,)).tolist()
    case = make_case(cuda, lens, heads=32, kv_heads=8, head_dim=head_dim, page_size=page_size)
    scales = {}
    if codes:
        k, v = (torch.randint_like(x, -127, 128, dtype=torch.int8) for x in case[1:3])
        case = case._replace(k_cache=k, v_cache=v)
        scales = {n: torch.rand(k.shape[:3], device=cuda) / 64 for n in ("k_scale", "v_scale")}
    first, lse = decode_by("hopper", case, **scales)
    for _ in range(30):
        again, again_lse = decode(case, **scales)
        assert torch.equal(again, first)
        assert torch.equal(again_lse, lse)


@pytest.mark.parametrize(("heads", "queries"), [(8, 2), (8, 4), (6, 5), (2, 16), (4, 16)])
def test_pieces_of_many_rows(cuda, heads, queries):
    case = make_case(cuda, [3000, 77, 5000], heads=heads, head_dim=64, queries=queries)
    boundaries = torch.arange(4, device=cuda, dtype=torch.int32) * queries
    assert_same(case, cu_seqlens_q=boundaries, max_seqlen_q=queries)


@pytest.mark.parametrize("k_lens", [[2000] * 8, [2000] * 40, [1, 0, 9000]])
def test_launches_leave_zeros(cuda, k_lens):
    """On streams of their own, replayed with other pointers, and in a graph."""
    cases = [make_case(cuda, k_lens, heads=32, kv_heads=8) for _ in range(2)]
    want = [decode_by("portable", case) for case in cases]
    graph = torch.cuda.CUDAGraph()
    for _ in range(3):
        for case, (out, lse) in zip(cases, want, strict=True):
            for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    results = decode(case)
                torch.cuda.current_stream().wait_stream(stream)
                assert_close(results[0], out.double(), roundings=4, scale=1.0)
                assert_close(results[1], lse.double(), roundings=8, scale=4.0)
    with torch.cuda.graph(graph):
        captured = decode(cases[0])
    for _ in range(3):
        graph.replay()
        assert_close(captured[0], want[0][0].double(), roundings=4, scale=1.0)
    torch.cuda.synchronize()
    of_streams = [c for s in _counters._supplies.values() for c in s.of_stream.values()]
    assert len(of_streams) >= 2
    assert not any(counter.any() for counter in of_streams)
