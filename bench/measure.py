"""One case, all its implementations: right first, then timed."""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch

from bench.case import Case, CeilingKind, Inputs, Peer, error_of, ours, poisoned_allocations
from bench.ceilings import Ceiling
from bench.results import OURS, Row
from bench.timing import Call, Round, graph_us, make_round

Ceilings = Mapping[CeilingKind, Ceiling]
Work = TypeVar("Work")
Figures = dict[str, Any]
"""What a row gets, by its fields."""


def measure_case(case: Case, device: torch.device, ceilings: Ceilings) -> list[Row]:
    """Time on the device, of ours and of each peer."""
    ceiling = ceilings[case.ceiling]

    def time(works: list[Round]) -> Iterator[Figures]:
        for us in graph_us(works, device):
            rate = case.amount / us / 1e6
            yield {
                "graph_us": us, "rate": rate, "unit": ceiling.unit, "share": rate / ceiling.rate,
            }  # fmt: skip

    return check_and_time(
        case,
        device,
        lambda calls: make_round(calls, device),
        time,
        lambda inputs: case.rotation(inputs, device),
    )


def check_and_time(
    case: Case,
    device: torch.device,
    prepare: Callable[[Sequence[Call]], Work],
    time: Callable[[list[Work]], Iterable[Figures]],
    input_sets: Callable[[Inputs], list[Inputs]],
) -> list[Row]:
    """A row for ours and for each peer. What fails says so in its row and stops nothing else, but
    in `time`, which they share.

    `prepare` gets the calls of one implementation on different inputs, `time` what it made of those
    of all.
    """
    torch.manual_seed(0)  # a case has the same inputs whichever ran before it
    try:
        inputs = case.make(device)
        implementations = {OURS: ours(case), **case.peers}
        rows = _check(case, implementations, inputs)
        sets = input_sets(inputs)
        works: dict[str, Work] = {}
        for name, peer in implementations.items():
            if rows[name].ok:
                try:
                    with peer.context():
                        works[name] = prepare([peer.prepare(*inputs) for inputs in sets])
                except Exception as failure:
                    rows[name] = failed(case, name, failure)
        try:
            for name, figures in zip(works, time([*works.values()]), strict=True):
                rows[name] = replace(rows[name], **figures)
        except Exception as failure:
            rows |= {name: failed(case, name, failure) for name in works}
    except Exception as failure:
        rows = {OURS: failed(case, OURS, failure)}
    _free(device)
    return [*rows.values()]


def _check(case: Case, implementations: Mapping[str, Peer], inputs: Inputs) -> dict[str, Row]:
    """Rows without times. All are checked before any is timed: timing may mutate the inputs."""
    judge = case.check(inputs)
    verdicts = {}
    for name, peer in implementations.items():
        try:
            with poisoned_allocations() if name == OURS else nullcontext():
                error = error_of(peer, inputs, judge)
        except Exception as failure:
            verdicts[name] = failed(case, name, failure)
            continue
        most = case.tolerance if peer.tolerance is None else peer.tolerance
        ok = error <= most
        note = "" if ok else f"wrong: error {error:.1e}, must be at most {most:.1e}"
        verdicts[name] = Row(case.op, case.name, name, ok=ok, error=error, note=note)
    return verdicts


def failed(case: Case, impl: str, failure: Exception) -> Row:
    lines = str(failure).strip().splitlines() or [""]
    return Row(case.op, case.name, impl, note=f"failed: {type(failure).__name__}: {lines[0][:200]}")


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
