"""Pairs of columns as a projection leaves them in registers: tiles [pairs, tokens] of one head.

x holds the first members of the pairs and y the second, in fp32. `_rotary.py` has the pieces for
heads that lie in memory, whose tiles are [heads, pairs].
"""

import triton
import triton.language as tl

from echokernels.attention._rotary import rotate
from echokernels.quant._row import encode, largest, magnitude, row_scale_of


@triton.jit
def column_of(pair, member, HALF: tl.constexpr, HEAD_DIM: tl.constexpr, IS_NEOX: tl.constexpr):
    """(column of a head that is a pair's first or second member, whether there is such a one).

    Columns that do not rotate are pairs of neighbours behind the rotating ones.
    """
    if not IS_NEOX:
        column = 2 * pair + member
    elif 2 * HALF == HEAD_DIM:
        # Without a choice the compiler sees that neighbours lie side by side, and stores vectors.
        column = pair + member * HALF
    else:
        column = tl.where(pair < HALF, pair + member * HALF, 2 * pair + member)
    return column, pair < (HEAD_DIM + 1 - member) // 2


@triton.jit
def normalise_pairs(
    x,  # f32[pairs, tokens]: whole heads, 0 where there is no column
    y,
    pair,
    in_table,
    weight_ptr,
    eps,
    HALF: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    IS_NEOX: tl.constexpr,
):
    """RMSNorm of the heads in the table; the others are padding and stay as they are."""
    inverse_rms = tl.rsqrt(tl.sum(x * x + y * y, axis=0) / HEAD_DIM + eps)[None, :]
    first, first_mask = column_of(pair, 0, HALF, HEAD_DIM, IS_NEOX)
    second, second_mask = column_of(pair, 1, HALF, HEAD_DIM, IS_NEOX)
    x_weight = tl.load(weight_ptr + first, mask=first_mask, other=0.0).to(tl.float32)[:, None]
    y_weight = tl.load(weight_ptr + second, mask=second_mask, other=0.0).to(tl.float32)[:, None]
    x = tl.where(in_table[None, :], x * inverse_rms * x_weight, x)
    y = tl.where(in_table[None, :], y * inverse_rms * y_weight, y)
    return x, y


@triton.jit
def rotate_pairs(x, y, pair, position, in_table, cos_sin_ptr, cos_sin_stride, HALF: tl.constexpr):
    """RoPE of pairs [pairs, tokens]; those from HALF on stay as they are."""
    mask = (pair < HALF)[:, None] & in_table[None, :]
    cos_ptr = cos_sin_ptr + (position * cos_sin_stride)[None, :] + pair[:, None]
    cos = tl.load(cos_ptr, mask=mask, other=1.0)
    sin = tl.load(cos_ptr + HALF, mask=mask, other=0.0)
    rotated_x, rotated_y = rotate(x, y, cos, sin)
    return tl.where(mask, rotated_x, x), tl.where(mask, rotated_y, y)


@triton.jit
def store_pairs(
    head_ptr,  # pointers [tokens]: the head of each
    x,
    y,
    pair,
    token_mask,
    HALF: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    IS_NEOX: tl.constexpr,
):
    first, first_mask = column_of(pair, 0, HALF, HEAD_DIM, IS_NEOX)
    second, second_mask = column_of(pair, 1, HALF, HEAD_DIM, IS_NEOX)
    dtype = head_ptr.dtype.element_ty
    head_ptr, token_mask = head_ptr[None, :], token_mask[None, :]
    tl.store(head_ptr + first[:, None], x.to(dtype), mask=first_mask[:, None] & token_mask)
    tl.store(head_ptr + second[:, None], y.to(dtype), mask=second_mask[:, None] & token_mask)


@triton.jit
def store_pair_codes(
    head_ptr,  # pointers [tokens]: the codes of each
    scale_ptr,  # f32 pointers [tokens]
    x,  # whole heads, 0 where there is no column
    y,
    pair,
    token_mask,
    DTYPE: tl.constexpr,  # what heads are rounded to before they are quantised
    HALF: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    IS_NEOX: tl.constexpr,
):
    """Stores heads quantised, and their scales."""
    CODE: tl.constexpr = head_ptr.dtype.element_ty
    x, y = x.to(DTYPE).to(tl.float32), y.to(DTYPE).to(tl.float32)
    scale = row_scale_of(largest(tl.maximum(magnitude(x), magnitude(y)), 0), CODE)
    tl.store(scale_ptr, scale, mask=token_mask)
    x, y = encode(x, scale[None, :], CODE), encode(y, scale[None, :], CODE)
    store_pairs(head_ptr, x, y, pair, token_mask, HALF, HEAD_DIM, IS_NEOX)
