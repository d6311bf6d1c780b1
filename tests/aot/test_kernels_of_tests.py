"""Kernels that only tests on a GPU launch: here is where they notice that an interface changed."""

import pytest
import torch

from echokernels._target import KNOWN_TARGETS
from tests.aot.harness import compile_kernel, meta
from tests.ops import test_decode_shares as shares
from tests.ops import test_hopper_order as order

HOPPER = KNOWN_TARGETS["sm_90"]


def index(*shape):
    return meta(*shape, dtype=torch.int32)


@pytest.mark.parametrize("q_len", [None, 5])
def test_shares_of_the_device(q_len):
    shape = shares.shape_of(q_len, window_left=100)
    boundaries = None if q_len is None else index(4)
    values = (index(4, 4), index(3), boundaries, 3, 2, 100, 0, 1.0)
    compile_kernel(
        shares._write_shares_kernel, values, {"S": shape, "BLOCK_SEQS": 4}, HOPPER
    )  # fmt: skip


@pytest.mark.parametrize("has_list", [False, True])
@pytest.mark.parametrize("paged", [False, True])
def test_order_of_work(has_list, paged):
    shape = order.shape_of(2, has_list, paged)
    lengths = (index(4), None if paged else index(4), index(3) if paged else None)
    values = (index(9, 7), index(8, 2), index(1), *lengths, 3, 2**30, 8, 4, 1500)
    compile_kernel(order._write_order_kernel, values, {"S": shape, "num_warps": 4}, HOPPER)
