"""Which class implements which architecture."""

from __future__ import annotations

from echokernels.runtime.config import ModelConfig
from echokernels.runtime.layers import Placement
from echokernels.runtime.models.llama import LlamaForCausalLM

CausalLM = LlamaForCausalLM  # any of the classes below
MODELS: dict[str, type[CausalLM]] = {"llama": LlamaForCausalLM}


def build_model(config: ModelConfig, place: Placement) -> CausalLM:
    """The model of `config`, uninitialised. Raises ValueError for an unknown architecture."""
    if config.architecture not in MODELS:
        raise ValueError(
            f"architecture is {config.architecture!r}, must be one of {', '.join(MODELS)}"
        )
    return MODELS[config.architecture](config, place)
