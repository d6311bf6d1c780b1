"""Rotary position embedding (Su et al., "RoFormer", 2021), in place on query and key.

    x' = x cos(a) - y sin(a)        y' = y cos(a) + x sin(a)        a = position * inv_freq[i]

(x, y) is pair i of a head: columns (i, i + rotary_dim/2) if `is_neox`, else (2i, 2i + 1).
rotary_dim is the width of the table; columns of a head beyond it stay as they are (partial rotary).
Cosines and sines come from an fp32 table (see rope_table.py); the rotation is in fp32 and rounded
once. `query` and `key` are mutated.

A token whose position lies outside the table is padding: its heads stay as they are.
"""

import torch
import triton
import triton.language as tl

from echokernels._checks import (
    FLOATS,
    INDEX,
    check_dim,
    check_dtype,
    check_indices,
    check_last_contiguous,
    check_same_device,
    check_shape,
)
from echokernels._launch import launch
from echokernels._library import define_op
from echokernels._tuning import TileConfig, select
from echokernels.attention import reference


@triton.jit
def _rotate_heads(
    token_ptr,  # [num_heads, head_dim]
    stride_head,
    first_head,
    num_heads,
    cos,  # [1, BLOCK_HALF]
    sin,  # [1, BLOCK_HALF]
    half,
    in_table,
    IS_NEOX: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Rotates heads first_head .. first_head + BLOCK_H of one token."""
    head = (first_head + tl.arange(0, BLOCK_H))[:, None]
    head_ptr = token_ptr + head.to(tl.int64) * stride_head
    dtype = token_ptr.dtype.element_ty
    # The loads need not wait for the position, which only the stores depend on.
    if IS_NEOX:
        pair = tl.arange(0, BLOCK_HALF)[None, :]
        mask = (head < num_heads) & (pair < half)
        x = tl.load(head_ptr + pair, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(head_ptr + half + pair, mask=mask, other=0.0).to(tl.float32)
        tl.store(head_ptr + pair, (x * cos - y * sin).to(dtype), mask=mask & in_table)
        tl.store(head_ptr + half + pair, (y * cos + x * sin).to(dtype), mask=mask & in_table)
    else:
        column = tl.arange(0, 2 * BLOCK_HALF)[None, :]
        mask = (head < num_heads) & (column < 2 * half)
        xy = tl.load(head_ptr + column, mask=mask, other=0.0).to(tl.float32)
        x, y = tl.split(tl.reshape(xy, [BLOCK_H, BLOCK_HALF, 2]))
        rotated = tl.join(x * cos - y * sin, y * cos + x * sin)
        rotated = tl.reshape(rotated, [BLOCK_H, 2 * BLOCK_HALF])
        tl.store(head_ptr + column, rotated.to(dtype), mask=mask & in_table)


# positions may be a slice at any offset of a larger buffer, so its alignment varies at run time.
@triton.jit(do_not_specialize=["positions_ptr"])
def _rotary_embedding_kernel(
    query_ptr,  # [tokens, num_heads, head_dim], in and out
    key_ptr,  # [tokens, num_kv_heads, head_dim], in and out
    positions_ptr,  # int[tokens]
    cos_sin_ptr,  # f32[max_position, 2 * half]
    num_heads,
    num_kv_heads,
    half,
    max_position,
    query_stride_token,
    query_stride_head,
    key_stride_token,
    key_stride_head,
    cos_sin_stride,
    IS_NEOX: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    query_tiles = tl.cdiv(num_heads, BLOCK_H)
    tiles = query_tiles + tl.cdiv(num_kv_heads, BLOCK_H)
    token = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles

    position = tl.load(positions_ptr + token).to(tl.int64)
    in_table = (position >= 0) & (position < max_position)
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    mask = (pair < half) & in_table
    cos_ptr = cos_sin_ptr + position * cos_sin_stride + pair
    cos = tl.load(cos_ptr, mask=mask, other=0.0)
    sin = tl.load(cos_ptr + half, mask=mask, other=0.0)

    if tile < query_tiles:
        _rotate_heads(
            query_ptr + token * query_stride_token,
            query_stride_head,
            tile * BLOCK_H,
            num_heads,
            cos,
            sin,
            half,
            in_table,
            IS_NEOX,
            BLOCK_H,
            BLOCK_HALF,
        )
    else:
        _rotate_heads(
            key_ptr + token * key_stride_token,
            key_stride_head,
            (tile - query_tiles) * BLOCK_H,
            num_kv_heads,
            cos,
            sin,
            half,
            in_table,
            IS_NEOX,
            BLOCK_H,
            BLOCK_HALF,
        )


def _config(max_heads: int, half: int) -> TileConfig:
    block_half = triton.next_power_of_2(half)
    # 1,024 pairs over 4 warps: a thread loads 16 bytes of x and 16 of y if they are bf16. The heads
    # of a program share its row of the table, whose elements are twice as wide as theirs.
    block_h = min(triton.next_power_of_2(max_heads), max(1, 1024 // block_half))
    num_warps = min(max(block_h * block_half // 256, 1), 4)
    return TileConfig(block_h, block_half, num_warps)


def _check(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_dim: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,  # noqa: ARG001
) -> None:
    check_dim("positions", positions, 1)
    check_dtype("positions", positions, INDEX)
    check_last_contiguous("positions", positions)
    check_dim("cos_sin_cache", cos_sin_cache, 2)
    # A table in the model's dtype would throw away the precision that the angles were made with.
    check_dtype("cos_sin_cache", cos_sin_cache, (torch.float32,))
    check_last_contiguous("cos_sin_cache", cos_sin_cache)
    rotary_dim = cos_sin_cache.shape[1]
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        raise ValueError(
            f"cos_sin_cache.shape is {tuple(cos_sin_cache.shape)}, must be (max_position, "
            f"rotary_dim) with an even rotary_dim from 2 to head_dim = {head_dim}"
        )
    check_dtype("query", query, FLOATS)
    _check_heads("query", query, positions.shape[0], head_dim)
    if key is not None:
        check_dtype("key", key, (query.dtype,))
        _check_heads("key", key, positions.shape[0], head_dim)
    check_same_device("query", query, positions=positions, key=key, cos_sin_cache=cos_sin_cache)


def _check_heads(name: str, x: torch.Tensor, tokens: int, head_dim: int) -> None:
    check_dim(name, x, 2, 3)
    if x.dim() == 3:
        check_shape(name, x, tokens, None, head_dim)
    else:
        check_shape(name, x, tokens, None)
        if x.shape[1] % head_dim:
            raise ValueError(
                f"{name}.shape is {tuple(x.shape)}, must have a last dimension divisible by "
                f"head_dim = {head_dim}"
            )
    check_last_contiguous(name, x)


def _heads(x: torch.Tensor, head_dim: int) -> tuple[int, int, int]:
    """(heads, stride of a token, stride of a head)."""
    if x.dim() == 3:
        return x.shape[1], x.stride(0), x.stride(1)
    return x.shape[1] // head_dim, x.stride(0), head_dim


def _debug_check(
    positions: torch.Tensor,
    query: torch.Tensor,  # noqa: ARG001
    key: torch.Tensor | None,  # noqa: ARG001
    head_dim: int,  # noqa: ARG001
    cos_sin_cache: torch.Tensor,
    is_neox: bool,  # noqa: ARG001
) -> None:
    check_indices("positions", positions, 0, cos_sin_cache.shape[0])


def _launch(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_dim: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> None:
    max_position, rotary_dim = cos_sin_cache.shape
    half = rotary_dim // 2
    num_heads, *query_strides = _heads(query, head_dim)
    num_kv_heads, *key_strides = (0, 0, 0) if key is None else _heads(key, head_dim)
    max_heads = max(num_heads, num_kv_heads)
    config = select("rotary_embedding", (max_heads, half), lambda: _config(max_heads, half))
    tiles = triton.cdiv(num_heads, config.block_m) + triton.cdiv(num_kv_heads, config.block_m)
    launch(
        _rotary_embedding_kernel,
        (positions.shape[0] * tiles,),
        query,
        query if key is None else key,
        positions,
        cos_sin_cache,
        num_heads,
        num_kv_heads,
        half,
        max_position,
        *query_strides,
        *key_strides,
        cos_sin_cache.stride(0),
        IS_NEOX=is_neox,
        BLOCK_H=config.block_m,
        BLOCK_HALF=config.block_n,
        num_warps=config.num_warps,
    )


_rotary_embedding = define_op(
    "rotary_embedding(Tensor positions, Tensor(a!) query, Tensor(b!)? key, int head_dim, "
    "Tensor cos_sin_cache, bool is_neox) -> ()",
    check=_check,
    triton=_launch,
    reference=reference.rotary_embedding,
    debug_check=_debug_check,
)


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_dim: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotates query and key in place, in one launch. Returns both.

    positions: int32 or int64 [tokens]. A token whose position lies outside the table keeps its
    heads as they are, which is meant for padding; ECHOKERNELS_DEBUG=1 refuses it with ValueError.
    query, key: [tokens, heads * head_dim] or [tokens, heads, head_dim], fp16, bf16 or fp32, of one
    dtype, last dimension contiguous; they may be views of one packed QKV tensor. key may be None.
    cos_sin_cache: fp32 [max_position, rotary_dim], made by `rope_table`. rotary_dim is even and at
    most head_dim; only the first rotary_dim columns of a head change.
    is_neox: a pair is columns (i, i + rotary_dim/2), else (2i, 2i + 1).

    Raises ValueError or TypeError for shapes, strides, devices or dtypes that do not fit.
    """
    _rotary_embedding(positions, query, key, head_dim, cos_sin_cache, is_neox)
    return query, key
