"""The sampling kernel compiles for every target, on NVIDIA GPUs without local memory."""

import pytest
import torch

from tests.aot.harness import TARGETS, compile_op, local_memory, meta


def compile_sample(target, vocab, dtype=torch.bfloat16, index=torch.int64, logprobs=True):
    f32, wide, index = (meta(3, dtype=d) for d in (torch.float32, torch.int64, index))
    logits = meta(3, vocab, dtype=dtype)
    return compile_op(
        "sample",
        target,
        index,
        f32 if logprobs else None,
        logits,
        f32,
        index,
        f32,
        f32,
        wide,
        index,
    )


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "vocab", [5, 49_152, 151_937]
)  # one small tile, whole tiles, a ragged last one
def test_sample(target, vocab):
    (kernel,) = compile_sample(target, vocab)
    if target.startswith("sm_"):
        assert local_memory(kernel) == 0


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_sample_dtypes(target, dtype):
    compile_sample(target, 49_152, dtype=dtype, index=torch.int32, logprobs=False)
