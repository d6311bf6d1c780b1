"""Hints for the L2 cache, for kernels that do little more than read and write."""

import torch

STREAMED_BYTES = 64 * 2**20
"""Inputs of this size fill an L2 cache: nothing of them is there for the next kernel."""


def eviction_of(*inputs: torch.Tensor) -> str:
    """The eviction policy for loads of `inputs`.

    In large ones, lines that were read are the last to be evicted, so those that were written go
    first. On an H200 this makes 16,384 tokens 1% to 5% faster. Small ones gain nothing by it, and
    would stay in the cache when nobody needs them.
    """
    num_bytes = sum(x.numel() * x.element_size() for x in inputs)
    return "evict_last" if num_bytes >= STREAMED_BYTES else ""
