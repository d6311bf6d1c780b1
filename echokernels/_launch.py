"""Launching kernels: every launch of the package goes through `launch`."""

from typing import Any

import torch

# CUDA's limits on the three dimensions of a grid.
_MAX_GRID = (2**31 - 1, 65_535, 65_535)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Runs `kernel` over `grid` on the device and current stream of its first argument, a tensor.

    `options` are the kernel's constexpr arguments, `num_warps` and `num_stages`. An empty grid
    launches nothing. The current device is left as it was.

    Raises ValueError when a dimension of the grid is beyond what the hardware can launch.
    """
    if 0 in grid:
        return
    for size, limit in zip(grid, _MAX_GRID, strict=False):
        if size > limit:
            raise ValueError(
                f"the launch grid is {grid}, each dimension must be at most {_MAX_GRID}"
            )
    device = args[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            _run(kernel, grid, args, options)
    else:
        _run(kernel, grid, args, options)


def _run(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]
) -> None:
    kernel[grid](*args, **options)


def scratch(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Uninitialised memory that a launcher's kernels share and nothing reads after them."""
    return torch.empty(shape, dtype=dtype, device=device)
