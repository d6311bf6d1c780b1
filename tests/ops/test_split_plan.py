"""What `split_plan` tells of a decode, beside what the device does."""

import pytest
import torch
import triton
import triton.language as tl

from echokernels import split_plan
from echokernels._target import INTERPRETED, KNOWN_TARGETS, assume
from echokernels.attention._split_k import chunks
from echokernels.attention.split import INVARIANT_SPLITS

LENS = [0, 1, 63, 64, 65, 500, 5000, 70_000]


@pytest.fixture
def h200():
    if INTERPRETED:
        pytest.skip("the kernel for Hopper does not run in the interpreter")
    with assume(KNOWN_TARGETS["sm_90"]):
        yield


@pytest.mark.usefixtures("h200")
def test_counts_follow_the_lengths_of_one_batch():
    plan = split_plan(LENS, 32, 8, 128)
    assert plan == sorted(plan)
    assert plan[:6] == [1] * 6
    assert plan[-1] > 10


@pytest.mark.usefixtures("h200")
def test_the_rest_of_the_batch_counts():
    assert split_plan([8192], 32, 8, 128) == [16]
    assert split_plan([8192] * 8, 32, 8, 128) == [2] * 8
    assert split_plan([1024] * 256, 32, 8, 128) == [1] * 256
    # Batch 12, 32k keys, and one KV head (vllm#48076, sglang#21775, flash-attention#2445).
    assert sum(split_plan([32_768] * 12, 32, 8, 128)) * 8 >= 132
    assert split_plan([131_072], 8, 1, 128) == [132]


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(
    "options",
    [{"dtype": torch.float32}, {"query_len": 9}],
)
def test_what_the_kernel_for_hopper_does_not_take_has_shares_too(options):
    given = {"seqused_k": [65_536, 8192, 64], "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    long, short, one_tile = split_plan(**(given | options))
    # Four programs an SM, for each of 8 KV heads or 4 of two tiles of rows.
    assert long + short == pytest.approx(4 * 132 // 8, abs=2)
    assert long > 5 * short > 5 * one_tile == 5


def test_other_gpus_share_out_the_keys_too():
    with assume(KNOWN_TARGETS["sm_80"]):
        counts = split_plan([60, 640, 65_536, 65_536], 32, 8, 128)
    assert counts[:2] == [1, 1]
    assert counts[2] == pytest.approx(counts[3], abs=1)
    assert counts[2] >= 26


def test_larger_batches_are_split_by_chunks():
    with assume(KNOWN_TARGETS["sm_80"]):
        counts = split_plan([60, 640, 65_536, 65_536] * 300, 32, 8, 128)
    assert counts == [1, 5, 8, 8] * 300


@triton.jit
def _chunk_kernel(out_ptr, lens_ptr, divisor, least, window, LEFT: tl.constexpr, N: tl.constexpr):
    k_len = tl.load(lens_ptr + tl.program_id(0)).to(tl.int32)
    first, chunk = chunks(1, k_len, divisor, least, window, LEFT, N)
    tl.store(out_ptr + tl.program_id(0), tl.maximum(tl.cdiv(k_len - first, chunk), 1))


@pytest.mark.parametrize(
    ("options", "least"), [({"num_splits": 5}, 1), ({"kv_split_size": 300}, 300)]
)
@pytest.mark.parametrize("window", [-1, 1000])
def test_forced_and_invariant_splits_are_those_of_the_device(device, options, least, window):
    if device.type == "cpu" and not INTERPRETED:
        pytest.skip("on the CPU kernels run in the interpreter")
    lens = torch.tensor(LENS, device=device)
    out = torch.zeros(len(LENS), dtype=torch.int32, device=device)
    divisor = options.get("num_splits", INVARIANT_SPLITS)
    _chunk_kernel[(len(LENS),)](
        out, lens, divisor, least, window, LEFT=window >= 0, N=64, num_warps=1
    )
    plan = split_plan(lens, 32, 8, 128, window_left=window, device=device, **options)
    assert plan == out.tolist()


def test_an_empty_batch():
    assert split_plan([], 32, 8, 128) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 33}, "num_heads is 33, must be divisible by 8"),
        ({"num_kv_heads": 0}, "num_kv_heads is 0"),
        ({"seqused_k": [-1]}, "seqused_k is -1"),
    ],
)
def test_bad_arguments(change, message):
    given = {"seqused_k": [5], "num_heads": 32, "num_kv_heads": 8, "head_dim": 128} | change
    with pytest.raises(ValueError, match=message):
        split_plan(**given)
