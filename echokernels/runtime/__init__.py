"""The paged-KV runtime: scheduler, cache pages, models and the engine that drives them.

from echokernels.runtime import LLM, SamplingParams
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echokernels.runtime.llm import LLM
    from echokernels.runtime.outputs import RequestOutput
    from echokernels.runtime.sampling_params import SamplingParams

__all__ = ["LLM", "RequestOutput", "SamplingParams"]

_MODULES = {
    "LLM": "echokernels.runtime.llm",
    "RequestOutput": "echokernels.runtime.outputs",
    "SamplingParams": "echokernels.runtime.sampling_params",
}


def __getattr__(name: str) -> Any:
    # Imported when first used: a part of the runtime needs only what it imports itself.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
