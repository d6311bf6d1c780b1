"""One case, all its implementations: right first, then timed."""

import gc
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace

import torch

from bench.case import Case, CeilingKind, Inputs, Peer, error_of, ours, poisoned_allocations
from bench.ceilings import Ceiling
from bench.results import OURS, Row
from bench.timing import eager_us, graph_us

Ceilings = Mapping[CeilingKind, Ceiling]


def measure_case(case: Case, device: torch.device, ceilings: Ceilings) -> list[Row]:
    """A row for ours and for each peer. What fails says so in its row and stops nothing else."""
    rows = []
    torch.manual_seed(0)  # a case has the same inputs whichever ran before it
    try:
        inputs = case.make(device)
        implementations = {OURS: ours(case), **case.peers}
        verdicts = _check(case, implementations, inputs)
        sets = case.rotation(inputs, device)
        for name, peer in implementations.items():
            row = verdicts[name]
            rows.append(_time(row, case, peer, sets, device, ceilings) if row.ok else row)
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
        ok = error <= case.tolerance
        note = "" if ok else f"wrong: error {error:.1e}, must be at most {case.tolerance:.1e}"
        verdicts[name] = Row(case.op, case.name, name, ok=ok, error=error, note=note)
    return verdicts


def _time(
    checked: Row,
    case: Case,
    peer: Peer,
    sets: list[Inputs],
    device: torch.device,
    ceilings: Ceilings,
) -> Row:
    try:
        calls = [peer.prepare(*inputs) for inputs in sets]
        with peer.context():
            eager = eager_us(calls, device)
            graph = graph_us(calls, device)
    except Exception as failure:
        return _failed(case, checked.impl, failure)
    ceiling = ceilings[case.ceiling]
    rate = case.amount / graph / 1e6
    return replace(
        checked,
        graph_us=graph,
        eager_us=eager,
        rate=rate,
        unit=ceiling.unit,
        share=rate / ceiling.rate,
    )


def _failed(case: Case, impl: str, failure: Exception) -> Row:
    lines = str(failure).strip().splitlines() or [""]
    return Row(case.op, case.name, impl, note=f"failed: {type(failure).__name__}: {lines[0][:200]}")


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
