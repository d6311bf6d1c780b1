"""Which ops ran: for the demo, and to answer "does it really use the kernels?"."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class OpTrace(TorchDispatchMode):
    """Counts the calls of `torch.ops.echo.*` in its context, which slows them: don't time it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        if func.namespace == "echo":
            self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))
