"""What the hardware is: the only place that asks.

Tile choices are pure functions of a `Target`, so they can be tested, and their kernels compiled,
for GPUs that are not there.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
import triton

from echokernels._replay import bypass

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Kernels run in Triton's interpreter, on the CPU (`TRITON_INTERPRET=1`, read once at import)."""


@dataclass(frozen=True)
class Target:
    """A GPU as the kernels see it. `shared_memory` is the most bytes one program may use."""

    name: str
    backend: str  # "cuda" or "hip"
    arch: int | str  # 90 for sm_90, "gfx942"
    warp_size: int
    num_sms: int
    shared_memory: int

    @property
    def launches_early(self) -> bool:
        """A kernel can be set up while the one before it still runs (see _pdl.py)."""
        return not INTERPRETED and self.backend == "cuda" and int(self.arch) >= 90

    @property
    def has_wgmma(self) -> bool:
        """Warpgroups multiply from shared memory. Later architectures have other instructions."""
        return self.backend == "cuda" and self.arch == 90

    @property
    def runs_hopper_kernels(self) -> bool:
        """Those in Gluon, which is not interpreted."""
        return not INTERPRETED and self.has_wgmma

    @property
    def casts_to_fp8(self) -> bool:
        """Kernels can round to float8_e4m3fn."""
        return INTERPRETED or self.backend == "hip" or int(self.arch) >= 89


# One of each family that the kernels are compiled for ahead of time.
KNOWN_TARGETS = {
    "sm_80": Target("sm_80", "cuda", 80, 32, 108, 163 * 1024),  # A100
    "sm_90": Target("sm_90", "cuda", 90, 32, 132, 227 * 1024),  # H100, H200
    "sm_100": Target("sm_100", "cuda", 100, 32, 148, 227 * 1024),  # B200
    "gfx942": Target("gfx942", "hip", "gfx942", 64, 304, 64 * 1024),  # MI300X
}

# The interpreter has no limits; small machines make it walk the same paths as large ones.
_INTERPRETER = Target("interpreter", "cuda", 80, 32, 8, 99 * 1024)


_assumed: ContextVar[Target | None] = ContextVar("echokernels_target", default=None)


@contextmanager
def assume(target: Target) -> Iterator[None]:
    """Within the context, kernels are chosen for `target` whatever the device (to compile them
    ahead of time)."""
    token = _assumed.set(target)
    try:
        with bypass():
            yield
    finally:
        _assumed.reset(token)


def target_of(device: torch.device) -> Target:
    """The target that kernels for tensors on `device` are chosen for."""
    assumed = _assumed.get()
    if assumed is not None:
        return assumed
    if device.type != "cuda":
        return _INTERPRETER
    return _cuda_target(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _cuda_target(index: int) -> Target:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        arch = properties.gcnArchName.split(":")[0]
        return Target(arch, "hip", arch, 64, properties.multi_processor_count, 64 * 1024)
    capability = properties.major * 10 + properties.minor
    return Target(
        f"sm_{capability}",
        "cuda",
        capability,
        32,
        properties.multi_processor_count,
        properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]
    )
