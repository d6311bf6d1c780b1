"""Which calls of flash_attn_varlen go to the kernel for Hopper. The op's tests show the rest."""

import pytest
import torch

from echokernels._target import INTERPRETED, KNOWN_TARGETS
from echokernels.attention import prefill_hopper

pytestmark = pytest.mark.skipif(INTERPRETED, reason="Gluon kernels are not interpreted")
SM_90 = KNOWN_TARGETS["sm_90"]


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def takes(q, k, *, v=None, out=None, target=SM_90, num_seqs=3, block_table=None, scale=0.1):
    out = torch.empty(q.shape, dtype=q.dtype, device="meta") if out is None else out
    v = k if v is None else v
    return prefill_hopper.can_run(target, q, k, v, out, num_seqs, block_table, scale)


def test_packed_keys():
    q, k = meta(100, 8, 128), meta(100, 2, 128)
    assert takes(q, k)
    assert takes(q.half(), k.half())
    assert not takes(q.float(), k.float())
    for name, target in KNOWN_TARGETS.items():
        assert takes(q, k, target=target) == (name == "sm_90")
    assert not takes(q, k[:0])
    assert not takes(q, k, num_seqs=5000)
    assert not takes(q, k, scale=0.0)
    assert not takes(q, k, scale=-0.1)


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_head_dims(head_dim):
    assert takes(meta(9, 4, head_dim), meta(9, 2, head_dim)) == (head_dim > 32)


def test_strides():
    qkv = meta(100, 12, 128)
    q, k, v = qkv[:, :8], qkv[:, 8:10], qkv[:, 10:]
    assert takes(q, k, v=v)  # of one projection
    assert takes(meta(100, 8, 136)[..., :128], k)  # heads 272 bytes apart
    assert not takes(meta(100, 8, 132)[..., :128], k)  # 264, which TMA cannot step
    assert not takes(q, meta(100, 1, 128).expand(100, 2, 128))  # nor 0
    assert not takes(q, k, out=meta(100, 8, 129)[..., :128])
    assert takes(meta(1, 8, 100)[..., :64], meta(1, 1, 100)[..., :64]) is False
    assert takes(meta(1, 1, 100)[..., :64], meta(1, 1, 100)[..., :64])  # no step is ever taken


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("page_size", [8, 16, 24, 32, 64, 96, 128, 192, 256])
def test_pages(head_dim, page_size):
    q, k, table = meta(100, 8, head_dim), meta(50, page_size, 2, head_dim), meta(3, 9)
    block_n = prefill_hopper.config(head_dim, has_codes=False).block_n
    wanted = page_size >= 16 and (block_n % page_size == 0 or page_size % block_n == 0)
    assert takes(q, k, block_table=table) == wanted


def test_layouts_of_pages():
    q, table = meta(100, 8, 128), meta(3, 9)
    assert takes(q, meta(50, 16, 2, 128), block_table=table)
    head_major = meta(50, 2, 16, 128).transpose(1, 2)
    assert takes(q, head_major, block_table=table)
    interleaved = meta(50, 2, 16, 2, 128)[:, 0]  # keys and values of a page side by side
    assert takes(q, interleaved, block_table=table)
    rows = meta(50, 16, 3, 128)[:, :, :2]  # gaps between slots
    assert takes(q, rows, block_table=table)
    assert not takes(q, meta(50, 16, 2, 132)[..., :128], block_table=table)  # 264 bytes a head
