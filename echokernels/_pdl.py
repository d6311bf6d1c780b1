"""Programmatic dependent launch: a kernel starts while the one before it on its stream finishes.

Between two small kernels the GPU idles for about a microsecond, as long as such a kernel takes.
From Hopper on a kernel can be launched early: its programs are set up, and wait before they touch
memory, while the kernel before still runs (CUDA Programming Guide, "Programmatic Dependent Launch
and Synchronization"). CUDA graphs keep this.

A kernel that takes part has a constexpr PDL, gets `**early_launch(device)` among its options, calls
`wait_for_previous(PDL)` in every program before its first load or store of global memory (also
before one that only returns: the kernel after it relies on that), and calls
`let_next_start(PDL)` where its own loads are on their way.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from echokernels._target import target_of


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Returns once the kernels before this one are done, and what they wrote is visible."""
    if PDL:
        gdc_wait()


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """The next kernel may be set up once every program of this one has come here or ended."""
    if PDL:
        gdc_launch_dependents()


def early_launch(device: torch.device) -> dict[str, Any]:
    """Options of a launch: PDL, and the compiler's own option, which only some targets know."""
    if target_of(device).launches_early:
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}
