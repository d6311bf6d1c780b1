"""A model, ready to run: its parameters filled from a checkpoint or at random."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from echokernels.runtime.checkpoint import open_checkpoint
from echokernels.runtime.config import TORCH_DTYPES, ModelConfig
from echokernels.runtime.layers import Linear, PackedLinear, Placement, RMSNorm
from echokernels.runtime.models.registry import CausalLM, build_model

LOAD_FORMATS = ("auto", "dummy")
# Old checkpoints store this although it follows from the configuration.
_DERIVED_SUFFIX = ".rotary_emb.inv_freq"


def load_model(
    path: str | Path,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    load_format: str = "auto",
    seed: int = 0,
) -> tuple[CausalLM, ModelConfig, Placement]:
    """The model at `path` (a Hugging Face folder or a GGUF file), its configuration, and where it
    was put.

    dtype: "auto" is the checkpoint's on a GPU and float32 on a CPU, which is faster there and
    exact.
    device: "auto" is the current GPU if there is one, else the CPU.
    load_format: "dummy" fills the parameters at random, from `seed`; a folder needs only its
    config.json then. Raises ValueError for a model that is missing, damaged or unknown and for
    options not allowed.
    """
    if load_format not in LOAD_FORMATS:
        raise ValueError(
            f"load_format is {load_format!r}, must be one of {', '.join(LOAD_FORMATS)}"
        )
    path = Path(path)
    place_device = resolve_device(device)
    if load_format == "dummy" and path.is_dir():
        # Imported here, so that GGUF files need no safetensors.
        from echokernels.runtime.hf_checkpoint import read_config

        config = read_config(path)
        place = Placement(resolve_dtype(dtype, config, place_device), place_device)
        model = build_model(config, place)
        fill_random(model, seed)
        return model, config, place
    checkpoint = open_checkpoint(path)
    place = Placement(resolve_dtype(dtype, checkpoint.config, place_device), place_device)
    model = build_model(checkpoint.config, place)
    if load_format == "dummy":
        fill_random(model, seed)
    else:
        try:
            load_weights(model, checkpoint.tensors())
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    return model, checkpoint.config, place


def resolve_device(device: str | torch.device) -> torch.device:
    """The device with its index. Raises ValueError if it is unknown or not there."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device is {device!r}, must be auto, cpu, cuda or cuda:N") from None
    if device.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    index = device.index
    if index is None and count > 0:
        index = torch.cuda.current_device()
    if index is None or index >= count:
        raise ValueError(f"device is {str(device)!r}, must be cpu or one of {count} CUDA devices")
    return torch.device("cuda", index)


def resolve_dtype(
    dtype: str | torch.dtype, config: ModelConfig, device: torch.device
) -> torch.dtype:
    """Raises ValueError unless `dtype` is "auto" or a floating type that the kernels take."""
    name = str(dtype).removeprefix("torch.")
    if name == "auto":
        name = "float32" if device.type == "cpu" else config.torch_dtype
    if name not in TORCH_DTYPES:
        raise ValueError(f"dtype is {dtype!r}, must be auto, {', '.join(TORCH_DTYPES)}")
    return getattr(torch, name)


def load_weights(model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copies each named tensor into its parameter, converted to that one's dtype and device.

    Raises ValueError, with the names, if a tensor is unexpected, has another shape or is missing.
    """
    targets = checkpoint_views(model)
    missing = dict.fromkeys(targets)
    unexpected = []
    for name, tensor in tensors:
        if name.endswith(_DERIVED_SUFFIX):
            continue
        if name not in targets:
            unexpected.append(name)
            continue
        target = targets[name]
        if tensor.shape != target.shape:
            raise ValueError(
                f"tensor {name!r} has shape {tuple(tensor.shape)}, must have {tuple(target.shape)}"
            )
        target.copy_(tensor)
        missing.pop(name, None)
    for kind, names in (("unexpected", unexpected), ("missing", list(missing))):
        if names:
            raise ValueError(
                f"{len(names)} tensors are {kind}: {', '.join(names[:5])}"
                f"{', ...' if len(names) > 5 else ''}; the model has {len(targets)}"
            )


def checkpoint_views(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's parameters under the names of a checkpoint: packed ones as their parts."""
    views = {}
    for path, module in model.named_modules():
        for kind, parameter in module.named_parameters(recurse=False):
            if isinstance(module, PackedLinear):
                parent = path.rpartition(".")[0]
                for part, view in module.split(parameter).items():
                    views[f"{parent}.{part}.{kind}"] = view
            else:
                views[f"{path}.{kind}"] = parameter
    return views


def fill_random(model: nn.Module, seed: int = 0) -> None:
    """Seeded weights of the usual size (normal, standard deviation 0.02; norms 1; biases 0).

    The same seed gives the same weights on one kind of device.
    """
    for module in model.modules():
        for kind, parameter in module.named_parameters(recurse=False):
            if isinstance(module, RMSNorm):
                parameter.fill_(1.0)
            elif isinstance(module, Linear) and kind == "bias":
                parameter.zero_()
            else:
                generator = torch.Generator(parameter.device).manual_seed(seed)
                parameter.normal_(0.0, 0.02, generator=generator)
                seed += 1
