"""A case: an op at one shape, what it is checked against and compared with, and what bounds it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch

from bench.timing import Call, num_sets

Outputs = torch.Tensor | tuple[torch.Tensor, ...]
Inputs = tuple[Any, ...]  # tensors and plain numbers
Check = Callable[[Inputs], Callable[[Outputs], float]]
CeilingKind = Literal["copy", "read", "matmul"]  # see ceilings.py


@dataclass(frozen=True)
class Peer:
    """Another implementation.

    `prepare(*inputs)` does, untimed, what is needed once and returns the call to time. The context
    is entered once, around all calls.
    """

    prepare: Callable[..., Call]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    tolerance: float | None = None  # instead of the case's, for one that rounds more often
    needs: frozenset[str] = frozenset()  # tags of the cases that it takes


@dataclass(frozen=True)
class Case:
    op: str
    name: str
    make: Callable[[torch.device], Inputs]  # one input set, random
    run: Callable[..., Outputs]  # ours, called with an input set, which it may mutate
    check: Check  # called with the inputs before any run, then with a run's outputs: the error
    tolerance: float  # the largest error that is right
    num_bytes: int  # through memory, if every input is read once and every output written once
    ceiling: CeilingKind
    peers: Mapping[str, Peer] = field(default_factory=dict)
    num_flops: int = 0
    in_place: bool = False
    tags: frozenset[str] = frozenset()  # what of it some peers need

    @property
    def amount(self) -> int:
        """What the ceiling counts: FLOPs, or bytes."""
        return self.num_flops if self.ceiling == "matmul" else self.num_bytes

    def rotation(self, inputs: Inputs, device: torch.device) -> list[Inputs]:
        """`inputs` and enough copies for each set to have left the L2 cache by its next use."""
        distinct_bytes = self.num_bytes // 2 if self.in_place else self.num_bytes
        return [inputs, *(clone(inputs) for _ in range(num_sets(distinct_bytes, device) - 1))]


def ours(case: Case) -> Peer:
    """Our implementation in the form of a peer."""
    return returning(case.run)


def returning(function: Callable[..., Outputs], tolerance: float | None = None) -> Peer:
    """Of a function that takes the inputs of a case and returns its outputs."""
    return Peer(lambda *inputs: partial(function, *inputs), tolerance=tolerance)


def mutating(function: Callable[..., object], *arguments: Any, outputs: Outputs) -> Call:
    """The call of a function that writes `outputs`, which are among its arguments."""

    def call() -> Outputs:
        function(*arguments)
        return outputs

    return call


def clone(inputs: Inputs) -> Inputs:
    return tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in inputs)


def error_of(peer: Peer, inputs: Inputs, error: Callable[[Outputs], float]) -> float:
    """The error of one run on a copy of `inputs`."""
    call = peer.prepare(*clone(inputs))
    with peer.context():
        return error(call())


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Within the context a new tensor holds NaN (or the largest integer): gaps in outputs show."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # what makes `torch.empty` fill
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
