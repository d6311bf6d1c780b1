"""The proof that nothing compiles any more: `no_jit`, around what must not wait for a compiler."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import triton

_knobs = triton.knobs.runtime
_lock = threading.Lock()
_depth = 0
_outer_hook: Any = None


@contextmanager
def no_jit() -> Iterator[None]:
    """Within the context, in every thread, a Triton kernel that is not ready raises RuntimeError.

    Ready is a kernel that ran before in this process, with arguments that Triton specialises in the
    same way; one that only lies in Triton's cache on disk is not. `warmup` makes kernels ready.
    What torch.compile generates is not covered, nor is anything in the interpreter.
    """
    global _depth, _outer_hook
    with _lock:
        if _depth == 0:
            _outer_hook, _knobs.jit_cache_hook = _knobs.jit_cache_hook, _refuse
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                _knobs.jit_cache_hook = _outer_hook


def _refuse(*, repr: str, **_: Any) -> bool:
    raise RuntimeError(
        f"a kernel would be compiled within no_jit(), call warmup() for its shapes first: {repr}"
    )
