"""Routes of tokens to experts, for the tests of what follows a router."""

import pytest
import torch
from hypothesis import strategies as st

from echokernels._target import INTERPRETED
from echokernels.moe import _order
from tests.strategies import generator, poisoned, seeds

SHAPES = [(1, 1), (3, 2), (8, 2), (60, 4), *([] if INTERPRETED else [(128, 8), (512, 16)])]
TOKENS = [0, 1, 2, 5, 33, 70, *([] if INTERPRETED else [260])]


@pytest.fixture(autouse=True, scope="module")
def small_chunks():
    """The interpreter takes long to sort; several chunks are to be had with a few tokens."""
    with pytest.MonkeyPatch.context() as patch:
        if INTERPRETED:
            patch.setattr(_order, "CHUNK", 32)
        yield


@st.composite
def routes(draw, most_experts=512):
    """(ids of each token, num_experts, expert_start): uniform, skewed, of one expert; of all
    experts, or of some; in one chunk, or in more."""
    experts, k = draw(st.sampled_from([s for s in SHAPES if s[0] <= most_experts]))
    tokens = draw(st.sampled_from(TOKENS))
    gen = generator(draw(seeds))
    skew = draw(st.sampled_from([0.0, 3.0, 50.0]))
    scores = torch.rand(tokens, experts, generator=gen) - skew * torch.arange(experts) / experts
    ids = scores.argsort(1, descending=True)[:, :k]
    ids = ids.gather(1, torch.rand(tokens, k, generator=gen).argsort(1))
    start, count = draw(st.sampled_from([(0, experts), (0, experts), (experts // 3, experts // 2)]))
    return ids.tolist(), k, max(count, 1), start


def in_order(ids, num_experts, expert_start):
    """For each expert its choices, token * k + j."""
    k = len(ids[0]) if ids else 1
    found = [[] for _ in range(num_experts)]
    for token, row in enumerate(ids):
        for j, expert in enumerate(row):
            if 0 <= expert - expert_start < num_experts:
                found[expert - expert_start].append(token * k + j)
    return found


def as_tensor(ids, k, dtype, device, pad=0):
    wide = poisoned(len(ids), k + pad, dtype=dtype, device=device)
    wide[:, :k] = torch.tensor(ids, dtype=dtype).view(len(ids), k).to(device)
    return wide[:, :k]
