"""Caches of codes with their scales, poisoned, and what a write must leave in them."""

from dataclasses import dataclass

import pytest
import torch

from tests.ops.paged_cache import empty_cache
from tests.ops.quant_oracle import CODE_DTYPES, assert_exact_codes, assert_same_values
from tests.strategies import poisoned

EACH_CODE = pytest.mark.parametrize("code", CODE_DTYPES)
# NumPy warns in the interpreter where a row is not finite.
NOT_FINITE = [
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning"),
]

HALVES = [127, -127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.99, -0.99]
CODES_OF_HALVES = [127, -127, 0, 2, 2, 0, -2, -2, 1, -1]


@dataclass(frozen=True)
class CodeCache:
    codes: torch.Tensor  # [num_pages, page_size, kv_heads, head_dim]
    scale: torch.Tensor  # f32[num_pages, page_size, kv_heads]
    buffers: tuple[torch.Tensor, torch.Tensor]  # what these two are views of

    def assert_received(self, new: torch.Tensor, slots: torch.Tensor) -> None:
        """Rows `new`, [tokens, kv_heads, head_dim], quantised at their slots, and nothing else."""
        num_pages, page_size = self.codes.shape[:2]
        slots, new = slots.long().cpu(), new.cpu()
        token = ((slots >= 0) & (slots < num_pages * page_size)).nonzero()[:, 0]
        place = (slots[token] // page_size, slots[token] % page_size)
        codes, dtype = self.codes.view(torch.int8), self.codes.dtype
        assert_exact_codes(codes.cpu()[place].view(dtype), self.scale.cpu()[place], new[token])
        place = tuple(index.to(codes.device) for index in place)
        for tensor, buffer in zip((codes, self.scale), self.buffers, strict=True):
            untouched = poisoned(*buffer.shape, dtype=buffer.dtype, device=buffer.device)
            tensor[place] = untouched.flatten()[0]
            assert_same_values(buffer, untouched)


def code_cache(
    shape: tuple[int, int, int, int],  # num_pages, page_size, kv_heads, head_dim
    dtype: torch.dtype,
    device: torch.device,
    *,
    head_major: bool = False,
    pad: int = 0,
    scale_head_major: bool = False,
    scale_pad: int = 0,
) -> CodeCache:
    """`scale_pad`: floats between one scale and the next."""
    codes, code_buffer = empty_cache(shape, head_major, pad, torch.int8, device)
    scale_shape = (*shape[:3], 1)
    scale, scale_buffer = empty_cache(
        scale_shape, scale_head_major, scale_pad, torch.float32, device
    )
    return CodeCache(codes.view(dtype), scale[..., 0], (code_buffer, scale_buffer))


def rows_of_a17(device: torch.device) -> torch.Tensor:
    """13 columns, which leave lanes of a tile empty: all zero, all 5, any."""
    return torch.stack([torch.zeros(13), torch.full((13,), 5.0), torch.linspace(-1, 2, 13)]).to(
        device
    )
