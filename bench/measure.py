"""One case, all its implementations: right first, then timed."""

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from bench.case import Case, CeilingKind, Inputs, Peer, error_of, ours, poisoned_allocations
from bench.ceilings import Ceiling
from bench.results import OURS, Row
from bench.timing import Call, graph_us

Ceilings = Mapping[CeilingKind, Ceiling]
Time = Callable[[Sequence[Call]], dict[str, Any]]
"""From calls on different inputs to the figures of a row."""


def measure_case(case: Case, device: torch.device, ceilings: Ceilings) -> list[Row]:
    """Time on the device, of ours and of each peer."""
    ceiling = ceilings[case.ceiling]

    def time(calls: Sequence[Call]) -> dict[str, Any]:
        us = graph_us(calls, device)
        rate = case.amount / us / 1e6
        return {"graph_us": us, "rate": rate, "unit": ceiling.unit, "share": rate / ceiling.rate}

    return check_and_time(case, device, time, lambda inputs: case.rotation(inputs, device))


def check_and_time(
    case: Case, device: torch.device, time: Time, input_sets: Callable[[Inputs], list[Inputs]]
) -> list[Row]:
    """A row for ours and for each peer. What fails says so in its row and stops nothing else."""
    rows = []
    torch.manual_seed(0)  # a case has the same inputs whichever ran before it
    try:
        inputs = case.make(device)
        implementations = {OURS: ours(case), **case.peers}
        verdicts = _check(case, implementations, inputs)
        sets = input_sets(inputs)
        for name, peer in implementations.items():
            row = verdicts[name]
            rows.append(_time(row, case, peer, sets, time) if row.ok else row)
    except Exception as failure:
        rows.append(_failed(case, OURS, failure))
    _free(device)
    return rows


def _check(case: Case, implementations: Mapping[str, Peer], inputs: Inputs) -> dict[str, Row]:
    """Rows without times. All are checked before any is timed: timing may mutate the inputs."""
    judge = case.check(inputs)
    verdicts = {}
    for name, peer in implementations.items():
        try:
            with poisoned_allocations() if name == OURS else nullcontext():
                error = error_of(peer, inputs, judge)
        except Exception as failure:
            verdicts[name] = _failed(case, name, failure)
            continue
        most = case.tolerance if peer.tolerance is None else peer.tolerance
        ok = error <= most
        note = "" if ok else f"wrong: error {error:.1e}, must be at most {most:.1e}"
        verdicts[name] = Row(case.op, case.name, name, ok=ok, error=error, note=note)
    return verdicts


def _time(checked: Row, case: Case, peer: Peer, sets: list[Inputs], time: Time) -> Row:
    try:
        calls = [peer.prepare(*inputs) for inputs in sets]
        with peer.context():
            return replace(checked, **time(calls))
    except Exception as failure:
        return _failed(case, checked.impl, failure)


def _failed(case: Case, impl: str, failure: Exception) -> Row:
    lines = str(failure).strip().splitlines() or [""]
    return Row(case.op, case.name, impl, note=f"failed: {type(failure).__name__}: {lines[0][:200]}")


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
