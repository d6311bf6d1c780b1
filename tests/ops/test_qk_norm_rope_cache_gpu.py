"""fused_qk_norm_rope_cache at sizes, and in graphs, that only a GPU can run."""

import pytest
import torch

from echokernels.attention.qk_norm_rope_cache import fused_qk_norm_rope_cache
from echokernels.attention.rope_table import rope_table

MAX_POSITION = 4096


def call(qkv, positions, table, weight, caches, slots):
    """Two query heads and a KV head of 64; returns its tensors, mutated."""
    fused_qk_norm_rope_cache(
        qkv, positions, table, weight, weight, num_heads=2, num_kv_heads=1, head_dim=64,
        k_cache=caches[0], v_cache=caches[1], slot_mapping=slots,
    )  # fmt: skip
    return qkv, caches


def gpu_inputs(tokens, device):
    qkv = torch.randn(tokens, 256, device=device).bfloat16()
    positions = torch.randint(MAX_POSITION, (tokens,), device=device)
    slots = torch.randperm(tokens, device=device)
    caches = torch.zeros(2, -(-tokens // 16), 16, 1, 64, dtype=torch.bfloat16, device=device)
    table = rope_table(64, MAX_POSITION, device=device)
    return qkv, positions, table, torch.rand(64, device=device), caches, slots


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [65_535, 65_536, 70_000])
def test_a22_more_rows_than_a_grid_dimension(cuda, tokens):
    qkv, positions, table, weight, caches, slots = gpu_inputs(tokens, cuda)
    want_qkv, want_caches = qkv.clone(), caches.clone()
    step = tokens // 2 + 1
    for rows in zip(want_qkv.split(step), positions.split(step), slots.split(step), strict=True):
        call(rows[0], rows[1], table, weight, want_caches, rows[2])
    call(qkv, positions, table, weight, caches, slots)
    assert torch.equal(qkv, want_qkv)
    assert torch.equal(caches, want_caches)


@pytest.mark.gpu
def test_a01_more_than_2_31_elements(cuda):
    """Of qkv, and of each cache."""
    tokens, width = 2**31 // 4096 + 2, 64 * 64
    qkv = torch.empty(tokens, width, dtype=torch.bfloat16, device=cuda)
    qkv[-2:] = torch.randn(2, width, device=cuda)
    last = qkv[-2:].clone()
    positions = torch.full((tokens,), -1, device=cuda)
    slots = positions.clone()
    positions[-2:] = torch.tensor([7, 300], device=cuda)
    num_pages = 2**31 // (16 * 64) + 2
    slots[-2:] = torch.tensor([3, num_pages * 16 - 1], device=cuda)
    caches = torch.empty(2, num_pages, 16, 1, 64, dtype=torch.bfloat16, device=cuda)
    small = torch.empty(2, 2, 1, 1, 64, dtype=torch.bfloat16, device=cuda)
    table, weight = rope_table(64, 512, device=cuda), torch.rand(64, device=cuda)
    for rows, where, cache, slot in (
        (last, positions[-2:], small, torch.arange(2, device=cuda)),
        (qkv, positions, caches, slots),
    ):
        fused_qk_norm_rope_cache(
            rows, where, table, weight, weight, num_heads=62, num_kv_heads=1, head_dim=64,
            k_cache=cache[0], v_cache=cache[1], slot_mapping=slot,
        )  # fmt: skip
    assert torch.equal(qkv[-2:], last)
    assert torch.equal(caches.flatten(1, 2)[:, slots[-2:]], small.flatten(1, 2))


@pytest.mark.gpu
def test_captured_graph_replays_on_new_inputs(cuda):
    static = gpu_inputs(5, cuda)
    call(*static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(*static)
    for _ in range(2):
        fresh = gpu_inputs(5, cuda)
        for old, new in zip(static, fresh, strict=True):
            old.copy_(new)
        graph.replay()
        for have, want in zip((static[0], static[4]), call(*fresh), strict=True):
            assert torch.equal(have, want)


@pytest.mark.gpu
def test_compiled_equals_eager(cuda):
    def double_and_call(qkv, positions, table, weight, k_cache, v_cache, slots):
        qkv = qkv * 2
        call(qkv, positions, table, weight, (k_cache, v_cache), slots)
        return qkv

    compiled = torch.compile(double_and_call, fullgraph=True, dynamic=True)
    for tokens in (3, 17):
        *inputs, caches, slots = gpu_inputs(tokens, cuda)
        want_caches = [cache.clone() for cache in caches]
        have_caches = [cache.clone() for cache in caches]
        want = double_and_call(*inputs, *want_caches, slots)
        assert torch.equal(compiled(*inputs, *have_caches, slots), want)
        for have_cache, want_cache in zip(have_caches, want_caches, strict=True):
            assert torch.equal(have_cache, want_cache)
