"""What the device can do at best, measured in the process that is compared with it.

copy     bytes read + written by a large device-to-device copy
read     bytes read by a kernel that only sums them up
matmul   FLOPs of a large bf16 matrix product, on random data: zeros run faster than anything real
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from bench.case import CeilingKind
from bench.timing import Call, eager_us, graph_us, make_round

_BLOCK = 4096
_BLOCKS_PER_PROGRAM = 4


@dataclass(frozen=True)
class Ceiling:
    """`amount` bytes or FLOPs in `us` microseconds."""

    kind: CeilingKind
    case: str
    amount: int
    us: float

    @property
    def unit(self) -> str:
        return "TFLOP/s" if self.kind == "matmul" else "TB/s"

    @property
    def rate(self) -> float:
        """In `unit`."""
        return self.amount / self.us / 1e6


def measure(device: torch.device, quick: bool) -> dict[CeilingKind, Ceiling]:
    elements, size = (2**20, 256) if quick else (2**30, 8192)
    return {
        "copy": _copy(device, elements),
        "read": _read(device, elements),
        "matmul": _matmul(device, size),
    }


def _copy(device: torch.device, elements: int) -> Ceiling:
    source = torch.randn(elements, device=device)
    target = torch.empty_like(source)
    # Not in a graph: there a copy is a node of its own kind, which runs at two thirds of the speed.
    us = eager_us([lambda: target.copy_(source)], device)
    return Ceiling("copy", f"{source.nbytes >> 20} MiB", 2 * source.nbytes, us)


def _read(device: torch.device, elements: int) -> Ceiling:
    source = torch.randn(elements, device=device)
    us = _graph_us(lambda: partial_sums(source), device)
    return Ceiling("read", f"{source.nbytes >> 20} MiB", source.nbytes, us)


def _matmul(device: torch.device, size: int) -> Ceiling:
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    return Ceiling("matmul", f"{size}^3", 2 * size**3, _graph_us(lambda: a @ b, device))


def _graph_us(call: Call, device: torch.device) -> float:
    return graph_us([make_round([call], device)], device)[0]


def partial_sums(x: torch.Tensor) -> torch.Tensor:
    """x: f32, a multiple of 16,384 elements. Returns the sum of every 16,384."""
    width = _BLOCK * _BLOCKS_PER_PROGRAM
    if x.device.type == "cpu":
        return x.view(-1, width).sum(-1)
    sums = torch.empty(x.numel() // width, device=x.device)
    _partial_sums_kernel[(sums.numel(),)](
        sums, x, BLOCK=_BLOCK, BLOCKS=_BLOCKS_PER_PROGRAM, num_warps=8
    )
    return sums


@triton.jit
def _partial_sums_kernel(
    sums_ptr,  # f32[n / BLOCKS / BLOCK]
    x_ptr,  # f32[n]
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    offsets = program * (BLOCK * BLOCKS) + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for block in tl.static_range(BLOCKS):  # unrolled: all the loads are in flight together
        total += tl.load(x_ptr + offsets + block * BLOCK)
    tl.store(sums_ptr + program, tl.sum(total, axis=0))
