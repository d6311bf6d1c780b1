"""What TMA can address, and descriptors of it."""

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

GLUON_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}
_TILE_DTYPES = GLUON_DTYPES | {torch.int8: gl.int8}


def fills_tiles(page_size: int, block_n: int) -> bool:
    """A tile of keys is a number of whole pages, or a page a number of tiles. Eight rows are what
    the order of a tile in shared memory repeats after."""
    return page_size >= 8 and (block_n % page_size == 0 or page_size % block_n == 0)


def is_addressable(x: torch.Tensor) -> bool:
    """TMA wants 16-byte steps, and none of 0."""
    item = x.element_size()
    strides = [x.stride(i) * item for i in range(x.dim() - 1) if x.shape[i] > 1]
    return x.data_ptr() % 16 == 0 and all(s > 0 and s % 16 == 0 for s in strides)


def descriptor(x: torch.Tensor, rows: int, block_d: int) -> TensorDescriptor:
    """Of [tokens, heads, head_dim] or [num_pages, page_size, kv_heads, head_dim]: `rows` tokens of
    one head, columns beyond head_dim zero."""
    return box_descriptor(x, [1] * (x.dim() - 3) + [rows, 1, block_d])


def box_descriptor(x: torch.Tensor, block: list[int]) -> TensorDescriptor:
    """Of any tensor, in boxes of `block`."""
    layout = gl.NVMMASharedLayout.get_default_for(block, _TILE_DTYPES[x.dtype])
    return TensorDescriptor(x, list(x.shape), [*steps(x), 1], block, layout)


def steps(x: torch.Tensor) -> list[int]:
    """All strides but the last. One along a dimension of 1 is never taken, but TMA wants it to be a
    multiple of 16 bytes."""
    return [x.stride(i) if x.shape[i] > 1 else 256 for i in range(x.dim() - 1)]
