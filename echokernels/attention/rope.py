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
    check_dim,
    check_dtype,
    check_indices,
    check_last_contiguous,
    check_same_device,
    check_shape,
)
from echokernels._l2 import eviction_of
from echokernels._launch import launch
from echokernels._library import define_op
from echokernels._pdl import early_launch, let_next_start, wait_for_previous
from echokernels._tuning import TileConfig, select
from echokernels.attention import reference
from echokernels.attention._arguments import check_rotary
from echokernels.attention._rotary import (
    heads_of,
    load_angles,
    load_heads,
    rotate_heads,
    store_heads,
)


# positions may be a slice at any offset of a larger buffer, so its alignment varies at run time.
@triton.jit(do_not_specialize=["positions_ptr"])
def _rotary_embedding_kernel(
    query_ptr,  # [tokens, NUM_HEADS, head_dim], in and out
    key_ptr,  # [tokens, NUM_KV_HEADS, head_dim], in and out
    positions_ptr,  # int[tokens]
    cos_sin_ptr,  # f32[max_position, 2 * HEADS.half]
    max_position,
    query_stride_token,
    query_stride_head,
    key_stride_token,
    key_stride_head,
    cos_sin_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    Q_PROGRAMS: tl.constexpr,  # of one token
    K_PROGRAMS: tl.constexpr,
    EVICTION: tl.constexpr,
    PDL: tl.constexpr,
):
    token = (tl.program_id(0) // (Q_PROGRAMS + K_PROGRAMS)).to(tl.int64)
    part = tl.program_id(0) % (Q_PROGRAMS + K_PROGRAMS)
    # Only pointers are chosen here. With a path for queries and one for keys the compiler moves
    # their common end together, and waits for the heads before it asks for the angles.
    if part < Q_PROGRAMS:
        number = NUM_HEADS
        stride_head = query_stride_head
        heads_ptr = query_ptr + token * query_stride_token
    else:
        part -= Q_PROGRAMS
        number = NUM_KV_HEADS
        stride_head = key_stride_head
        heads_ptr = key_ptr + token * key_stride_token

    wait_for_previous(PDL)
    position = tl.load(positions_ptr + token).to(tl.int64)
    # All heads are on their way before the first instruction that waits for the position.
    heads = load_heads(heads_ptr, stride_head, part, number, HEADS, EVICTION)
    let_next_start(PDL)
    if (position >= 0) & (position < max_position):
        cos, sin = load_angles(cos_sin_ptr + position * cos_sin_stride, HEADS)
        heads = rotate_heads(heads, cos, sin, query_ptr.dtype.element_ty)
        store_heads(heads_ptr, stride_head, part, number, heads, HEADS)


def _config(half: int) -> TileConfig:
    block_half = triton.next_power_of_2(half)
    # An H200 starts 0.82 programs a nanosecond, so those of 16,384 tokens should be few: with 512
    # pairs each they take 100 us whatever they do, with 1,024 the memory decides.
    return TileConfig(max(1, 1024 // block_half), block_half, num_warps=4)


def _check(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_dim: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,  # noqa: ARG001
) -> None:
    check_rotary(positions, cos_sin_cache, head_dim)
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
    config = select("rotary_embedding", half, lambda: _config(half))
    most = max(num_heads, num_kv_heads, 1)
    heads = heads_of(config, triton.cdiv(most, config.block_m), most, head_dim, half, is_neox)
    q_programs, k_programs = (
        triton.cdiv(number, heads.tiles * heads.block_h) for number in (num_heads, num_kv_heads)
    )
    launch(
        _rotary_embedding_kernel,
        (positions.shape[0] * (q_programs + k_programs),),
        query,
        query if key is None else key,
        positions,
        cos_sin_cache,
        max_position,
        *query_strides,
        *key_strides,
        cos_sin_cache.stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEADS=heads,
        Q_PROGRAMS=q_programs,
        K_PROGRAMS=k_programs,
        EVICTION=eviction_of(query),
        num_warps=config.num_warps,
        **early_launch(query.device),
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
