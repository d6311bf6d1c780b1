"""Measures on a GPU what decoding leaves open: how the keys of a batch are best shared out.
`echokernels calibrate` runs it once and keeps the result (`_calibration.py`).
"""

import math
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch

from echokernels._calibration import Entries
from echokernels._target import target_of
from echokernels.attention import decode_hopper
from echokernels.attention._decode_config import decode_config, portable_sharings
from echokernels.attention._sharing import Kernel, Kind, Sharing, forced_sharing
from echokernels.attention.paged_decode import paged_attention

PAGE_SIZE = 16
KV_HEADS = 8

_draw = random.Random(0)
SMALL: tuple[tuple[int, ...], ...] = ((1024,), (8192,), (32_768,), (131_072,))
"""Contexts of one sequence, whose keys many programs share."""
LARGE: tuple[tuple[int, ...], ...] = (
    (2048,) * 64,
    tuple(round(math.exp(_draw.uniform(math.log(128), math.log(16_384)))) for _ in range(64)),
)
"""Of one length, and ragged."""

_DTYPE = torch.bfloat16  # of queries
_SHAPES = ((128, 4), (128, 8), (128, 1), (64, 4))  # head dim, group
_SHAPES_OF_CODES = ((128, 4), (128, 8), (64, 4))

Measure = Callable[[Kind, Sequence[int], Sequence[Sharing]], list[float]]
"""The time of one decode of such contexts with each sharing. The dtype of a kind is the cache's."""


def kinds(device: torch.device) -> list[Kind]:
    """What is measured on a GPU."""
    target = target_of(device)
    found = []
    for head_dim, group in _SHAPES:
        is_hopper = decode_hopper.is_made_for(target, _DTYPE, head_dim, group, 1)
        kernel: Kernel = "hopper" if is_hopper else "portable"
        found += [Kind(kernel, head_dim, _DTYPE, group, is_large) for is_large in (False, True)]
    for head_dim, group in _SHAPES_OF_CODES:
        if decode_hopper.is_made_for(target, _DTYPE, head_dim, group, 1):
            found += [
                Kind("hopper", head_dim, torch.int8, group, is_large) for is_large in (False, True)
            ]
    return found


def candidates(kind: Kind, device: torch.device) -> tuple[Sharing, ...]:
    """The default first."""
    target = target_of(device)
    if kind.kernel == "hopper":
        default = decode_hopper.default_sharing(kind.is_large)
        return default, *(s for s in decode_hopper.SHARINGS if s != default)
    config, _ = decode_config(kind.head_dim, kind.dtype, kind.group, 1, False, target)
    return portable_sharings(config, kind.head_dim, kind.dtype, target)


def calibrate(
    of: Iterable[Kind],
    candidates_of: Callable[[Kind], Sequence[Sharing]],
    measure: Measure,
    advance: Callable[[Kind], object] = lambda _: None,
) -> Entries:
    """The best sharing of each kind: the least time by the geometric mean over contexts. `advance`
    is called after each."""
    entries = {}
    for kind in of:
        sharings = candidates_of(kind)
        times = [measure(kind, lens, sharings) for lens in (LARGE if kind.is_large else SMALL)]
        entries[kind.key] = best(sharings, times)._asdict()
        advance(kind)
    return entries


def best(sharings: Sequence[Sharing], times: Sequence[Sequence[float]]) -> Sharing:
    """Of times[contexts][sharing]. What is within 0.5% of the best loses to the first, the
    default."""
    scores = {
        sharing: sum(math.log(of_contexts[index]) for of_contexts in times) / len(times)
        for index, sharing in enumerate(sharings)
    }
    winner = min(sharings, key=scores.__getitem__)
    return sharings[0] if scores[sharings[0]] - scores[winner] < 0.005 else winner


def decode_us(kind: Kind, contexts: Sequence[int], sharings: Sequence[Sharing]) -> list[float]:
    """Microseconds by graph replay, in turns, over caches that do not stay in the L2."""
    device = torch.device("cuda", torch.cuda.current_device())
    sets = [_inputs(kind, contexts, device) for _ in range(_num_sets(kind, contexts, device))]
    graphs = [_capture(sets, sharing) for sharing in sharings]
    times: list[list[float]] = [[] for _ in graphs]
    order = random.Random(0)
    for _ in range(4):
        for index in order.sample(range(len(graphs)), len(graphs)):
            times[index] += _replays_us(graphs[index])
    return [statistics.median(of_graph) / len(sets) for of_graph in times]


def _num_sets(kind: Kind, contexts: Sequence[int], device: torch.device) -> int:
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    set_bytes = 2 * sum(contexts) * KV_HEADS * kind.head_dim * kind.dtype.itemsize
    return min(2 * l2_bytes // set_bytes + 1, 64)


def _inputs(kind: Kind, contexts: Sequence[int], device: torch.device) -> dict[str, Any]:
    counts = [-(-length // PAGE_SIZE) for length in contexts]
    pages = torch.randperm(sum(counts), device=device).int().split(counts)
    shape = (sum(counts), PAGE_SIZE, KV_HEADS, kind.head_dim)
    size = (len(contexts), KV_HEADS * kind.group, kind.head_dim)
    inputs = {
        "q": torch.randn(size, dtype=_DTYPE, device=device),
        "block_table": torch.nn.utils.rnn.pad_sequence(list(pages), batch_first=True),
        "seqused_k": torch.tensor(contexts, dtype=torch.int32, device=device),
    }
    for name in ("k", "v"):
        if kind.dtype == torch.int8:
            codes = torch.randint(-127, 128, shape, dtype=torch.int8, device=device)
            inputs |= {f"{name}_cache": codes}
            inputs |= {f"{name}_scale": torch.rand(shape[:3], device=device) / 64}
        else:
            inputs |= {f"{name}_cache": torch.randn(shape, dtype=kind.dtype, device=device)}
    return inputs


def _capture(sets: Sequence[dict[str, Any]], sharing: Sharing) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with forced_sharing(sharing), torch.no_grad():
        paged_attention(**sets[0])  # compiles
        with torch.cuda.graph(graph):
            for inputs in sets:
                paged_attention(**inputs)
    return graph


def _replays_us(graph: torch.cuda.CUDAGraph) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
    graph.replay()
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    events[-1].synchronize()
    return [a.elapsed_time(b) * 1e3 for a, b in pairwise(events)]
