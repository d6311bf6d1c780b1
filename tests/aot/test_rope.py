"""The rotary embedding compiles for every target."""

import pytest
import torch

from tests.aot.harness import TARGETS, compile_op, global_accesses, local_memory, meta

# Pairs of neighbours are split in registers, halves are separate loads: both compile everywhere.
PAIRINGS = pytest.mark.parametrize("is_neox", [True, False])


def compile_rope(
    target, is_neox, head_dim=128, rotary_dim=128, dtype=torch.bfloat16, index=torch.int64, tokens=5
):
    qkv = meta(tokens, (32 + 8 + 8) * head_dim, dtype=dtype)
    query, key, _ = qkv.split([32 * head_dim, 8 * head_dim, 8 * head_dim], dim=1)
    table = meta(4096, rotary_dim, dtype=torch.float32)
    positions = meta(tokens, dtype=index)
    return compile_op("rotary_embedding", target, positions, query, key, head_dim, table, is_neox)


@pytest.mark.parametrize("target", TARGETS)
@PAIRINGS
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (128, 128), (80, 32), (8, 6)])
def test_rotary_embedding(target, is_neox, head_dim, rotary_dim):
    compile_rope(target, is_neox, head_dim, rotary_dim)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_dtypes(target, dtype, index):
    compile_rope(target, True, dtype=dtype, index=index)


@pytest.mark.parametrize("target", TARGETS)
@PAIRINGS
def test_hints_for_the_l2(target, is_neox):
    compile_rope(target, is_neox, tokens=16_384)


@pytest.mark.parametrize("target", TARGETS)
def test_without_key(target):
    table = meta(64, 64, dtype=torch.float32)
    positions = meta(5, dtype=torch.int32)
    compile_op("rotary_embedding", target, positions, meta(5, 9, 64), None, 64, table, True)


@pytest.mark.parametrize("target", TARGETS)
@PAIRINGS
def test_gaps_between_heads(target, is_neox):
    query, key = (meta(5, heads, 80, dtype=torch.bfloat16)[:, :, :64] for heads in (32, 8))
    table = meta(64, 96, dtype=torch.float32)[:, :64]
    positions = meta(5, dtype=torch.int32)
    compile_op("rotary_embedding", target, positions, query, key, 64, table, is_neox)


@PAIRINGS
@pytest.mark.parametrize("tokens", [5, 16_384])  # without and with hints for the L2
def test_no_thread_asks_another(is_neox, tokens):
    """All loads and stores are 16 bytes wide, and table and heads are in one layout."""
    (kernel,) = compile_rope("sm_90", is_neox, tokens=tokens)
    assert {*global_accesses(kernel, wide=True)} == {"ld", "st"}
    assert global_accesses(kernel, wide=False) == ["ld"]  # the position
    assert kernel.metadata.shared == 0
    assert local_memory(kernel) == 0
