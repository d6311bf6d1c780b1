"""QKV projection with bias, QK-norm, RoPE and page write in its epilogue.

    qkv = x W^T + b                     heads of head_dim columns: queries, keys, values
    then what qk_norm_rope_cache.py does to qkv: norm, rotation, page write

x: [tokens, K], weight: [(num_heads + 2 * num_kv_heads) * head_dim, K] (the layout of nn.Linear).
Everything is in fp32 and rounded once, into `qkv`; a cache gets the very bits of `qkv`, or their
codes. `qkv`, the caches and their scales are mutated.

A program owns both columns of each of its pairs, so it needs no other to rotate them; to normalise
or quantise a head, it owns the whole head. Tile widths follow the number of tokens: the last bit of
a result may depend on the batch.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from echokernels._checks import check_dim, check_dtype, check_same_device, check_shape
from echokernels._gemm import (
    check_projection,
    project,
    split_pairs,
    split_tokens,
    tile_of,
    token_block,
    weight_rows,
    weight_tile,
)
from echokernels._launch import launch
from echokernels._library import define_op
from echokernels._pdl import early_launch, let_next_start, wait_for_previous
from echokernels._target import INTERPRETED, Target, target_of
from echokernels._tuning import TileConfig, select
from echokernels.attention import reference
from echokernels.attention._arguments import scale_strides
from echokernels.attention._pairs import (
    column_of,
    normalise_pairs,
    rotate_pairs,
    store_pair_codes,
    store_pairs,
)
from echokernels.attention.qk_norm_rope_cache import check as check_epilogue
from echokernels.attention.qk_norm_rope_cache import debug_check as debug_check_epilogue
from echokernels.quant._row import check_has_casts


# Index tensors may be slices at any offset of larger buffers: their alignment varies at run time.
@triton.jit(do_not_specialize=["positions_ptr", "slot_mapping_ptr", "num_tokens", "token_tiles"])
def _qkv_rope_kernel(
    qkv_ptr,  # [num_tokens, (num_heads + 2 * num_kv_heads) * HEAD_DIM]
    x_ptr,  # [num_tokens, K]
    weight_ptr,  # [(num_heads + 2 * num_kv_heads) * HEAD_DIM, K]
    bias_ptr,  # [(num_heads + 2 * num_kv_heads) * HEAD_DIM], or None
    positions_ptr,  # int[num_tokens]
    cos_sin_ptr,  # f32[max_position, 2 * HALF]
    q_weight_ptr,  # [HEAD_DIM], or None
    k_weight_ptr,  # [HEAD_DIM], or None
    k_cache_ptr,  # [num_pages, PAGE_SIZE, num_kv_heads, HEAD_DIM], or None
    v_cache_ptr,
    slot_mapping_ptr,  # int[num_tokens]
    k_scale_ptr,  # f32[num_pages, PAGE_SIZE, num_kv_heads], or None: the caches are no codes
    v_scale_ptr,  # likewise
    num_tokens,
    token_tiles,
    num_heads,
    num_kv_heads,
    K,
    max_position,
    num_slots,
    eps,
    qkv_stride,
    x_stride,
    weight_stride,
    cos_sin_stride,
    k_cache_stride_page,
    k_cache_stride_slot,
    k_cache_stride_head,
    v_cache_stride_page,
    v_cache_stride_slot,
    v_cache_stride_head,
    k_scale_stride_page,
    k_scale_stride_slot,
    k_scale_stride_head,
    v_scale_stride_page,
    v_scale_stride_slot,
    v_scale_stride_head,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,  # pairs that rotate
    IS_NEOX: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,  # columns of a head
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    head_tiles: tl.constexpr = (HEAD_DIM + BLOCK_M - 1) // BLOCK_M
    tile, token_tile = tile_of(
        tl.program_id(0), (num_heads + 2 * num_kv_heads) * head_tiles, token_tiles
    )
    head = (tile // head_tiles).to(tl.int64)
    first_pair = tile % head_tiles * (BLOCK_M // 2)
    token = token_tile.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    token_mask = token < num_tokens
    # Loaded ahead of the weights, which hide the wait.
    position = tl.load(positions_ptr + token, mask=token_mask, other=-1).to(tl.int64)
    in_table = (position >= 0) & (position < max_position)

    row = tl.arange(0, BLOCK_M)
    column, column_mask = column_of(first_pair + row // 2, row % 2, HALF, HEAD_DIM, IS_NEOX)
    weight_row = head * HEAD_DIM + column
    acc = project(
        weight_ptr, weight_stride, weight_row, column_mask,
        x_ptr, x_stride, token, token_mask, K, EVEN_K, BLOCK_K, UPCAST,
    )  # fmt: skip
    let_next_start(PDL)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + weight_row, mask=column_mask, other=0.0)
        acc += bias.to(tl.float32)[:, None]

    x, y = split_pairs(acc)
    pair = first_pair + tl.arange(0, BLOCK_M // 2)
    if head < num_heads:
        if q_weight_ptr is not None:
            x, y = normalise_pairs(x, y, pair, in_table, q_weight_ptr, eps, HALF, HEAD_DIM, IS_NEOX)
    elif head < num_heads + num_kv_heads:
        if k_weight_ptr is not None:
            x, y = normalise_pairs(x, y, pair, in_table, k_weight_ptr, eps, HALF, HEAD_DIM, IS_NEOX)
    if head < num_heads + num_kv_heads:
        x, y = rotate_pairs(x, y, pair, position, in_table, cos_sin_ptr, cos_sin_stride, HALF)

    head_ptr = qkv_ptr + token * qkv_stride + head * HEAD_DIM
    store_pairs(head_ptr, x, y, pair, token_mask, HALF, HEAD_DIM, IS_NEOX)
    if slot_mapping_ptr is not None:
        dtype: tl.constexpr = qkv_ptr.dtype.element_ty
        slot = tl.load(slot_mapping_ptr + token, mask=token_mask, other=-1).to(tl.int64)
        is_stored = (slot >= 0) & (slot < num_slots)
        page, offset = slot // PAGE_SIZE, slot % PAGE_SIZE
        kv_head = head - num_heads
        if kv_head >= num_kv_heads:
            slot_ptr = (
                v_cache_ptr + page * v_cache_stride_page + offset * v_cache_stride_slot
                + (kv_head - num_kv_heads) * v_cache_stride_head
            )  # fmt: skip
            if v_scale_ptr is None:
                store_pairs(slot_ptr, x, y, pair, is_stored, HALF, HEAD_DIM, IS_NEOX)
            else:
                scale_ptr = (
                    v_scale_ptr + page * v_scale_stride_page + offset * v_scale_stride_slot
                    + (kv_head - num_kv_heads) * v_scale_stride_head
                )  # fmt: skip
                store_pair_codes(
                    slot_ptr, scale_ptr, x, y, pair, is_stored, dtype, HALF, HEAD_DIM, IS_NEOX
                )
        elif kv_head >= 0:
            slot_ptr = (
                k_cache_ptr + page * k_cache_stride_page + offset * k_cache_stride_slot
                + kv_head * k_cache_stride_head
            )  # fmt: skip
            if k_scale_ptr is None:
                store_pairs(slot_ptr, x, y, pair, is_stored, HALF, HEAD_DIM, IS_NEOX)
            else:
                scale_ptr = (
                    k_scale_ptr + page * k_scale_stride_page + offset * k_scale_stride_slot
                    + kv_head * k_scale_stride_head
                )  # fmt: skip
                store_pair_codes(
                    slot_ptr, scale_ptr, x, y, pair, is_stored, dtype, HALF, HEAD_DIM, IS_NEOX
                )


def _blocks(
    num_tokens: int, heads: int, head_dim: int, whole_heads: bool, itemsize: int, target: Target
) -> tuple[int, int]:
    """(BLOCK_M, BLOCK_T). `whole_heads`: norms and codes need every column of a head in one
    program."""
    block_m = max(16, 2 * triton.next_power_of_2(triton.cdiv(head_dim, 2)))
    block_t = token_block(num_tokens, itemsize)
    if head_dim > 128:
        # A tile of such a head and 128 tokens would not fit into registers.
        block_t = min(block_t, 64)
    if not whole_heads:
        block_m = min(block_m, weight_rows(heads * head_dim, block_t, itemsize, target))
    row_tiles = heads * triton.cdiv(head_dim, block_m)
    return block_m, split_tokens(block_t, num_tokens, row_tiles, target)


def _config(
    block_m: int, block_t: int, heads: int, head_dim: int, itemsize: int, target: Target
) -> TileConfig:
    return weight_tile(block_m, block_t, heads * triton.cdiv(head_dim, block_m), itemsize, target)


def _check(
    qkv: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *rest: Any,
) -> None:
    check_projection(x, weight, bias)
    check_dtype("qkv", qkv, (x.dtype,))
    check_epilogue(
        qkv, positions, cos_sin_cache, q_weight, k_weight, eps, num_heads, num_kv_heads, head_dim,
        *rest,
    )  # fmt: skip
    check_shape("weight", weight, qkv.shape[1], None)
    check_shape("x", x, qkv.shape[0], None)
    check_same_device("x", x, qkv=qkv)


def _debug_check(
    qkv: torch.Tensor,
    x: torch.Tensor,  # noqa: ARG001
    weight: torch.Tensor,  # noqa: ARG001
    bias: torch.Tensor | None,  # noqa: ARG001
    *rest: Any,
) -> None:
    debug_check_epilogue(qkv, *rest)


def _launch(
    qkv: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    is_neox: bool,
    k_cache: torch.Tensor | None,
    v_cache: torch.Tensor | None,
    slot_mapping: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    if k_cache is not None:
        check_has_casts("k_cache", k_cache)
    num_tokens, input_width = x.shape
    heads = num_heads + 2 * num_kv_heads
    max_position, rotary_dim = cos_sin_cache.shape
    num_pages, page_size = (0, 1) if k_cache is None else k_cache.shape[:2]
    target = target_of(x.device)
    whole_heads = any(tensor is not None for tensor in (q_weight, k_weight, k_scale))
    block_m, block_t = _blocks(num_tokens, heads, head_dim, whole_heads, x.element_size(), target)
    key = (block_m, block_t, head_dim, heads, input_width, x.element_size(), target.name)
    config = select(
        "fused_qkv_rope",
        key,
        lambda: _config(block_m, block_t, heads, head_dim, x.element_size(), target),
    )
    token_tiles = triton.cdiv(num_tokens, block_t)
    launch(
        _qkv_rope_kernel,
        (heads * triton.cdiv(head_dim, config.block_m) * token_tiles,),
        qkv,
        x,
        weight,
        bias,
        positions,
        cos_sin_cache,
        q_weight,
        k_weight,
        k_cache,
        v_cache,
        slot_mapping,
        k_scale,
        v_scale,
        num_tokens,
        token_tiles,
        num_heads,
        num_kv_heads,
        input_width,
        max_position,
        num_pages * page_size,
        eps,
        qkv.stride(0),
        x.stride(0),
        weight.stride(0),
        cos_sin_cache.stride(0),
        *((0, 0, 0) if k_cache is None else k_cache.stride()[:3]),
        *((0, 0, 0) if v_cache is None else v_cache.stride()[:3]),
        *scale_strides(k_scale),
        *scale_strides(v_scale),
        HEAD_DIM=head_dim,
        HALF=rotary_dim // 2,
        IS_NEOX=is_neox,
        PAGE_SIZE=page_size,
        EVEN_K=input_width % config.block_n == 0,
        BLOCK_M=config.block_m,
        BLOCK_T=block_t,
        BLOCK_K=config.block_n,
        UPCAST=INTERPRETED,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **early_launch(x.device),
    )


_fused_qkv_rope = define_op(
    "fused_qkv_rope(Tensor(a!) qkv, Tensor x, Tensor weight, Tensor? bias, Tensor positions, "
    "Tensor cos_sin_cache, Tensor? q_weight, Tensor? k_weight, float eps, int num_heads, "
    "int num_kv_heads, int head_dim, bool is_neox, Tensor(b!)? k_cache, Tensor(c!)? v_cache, "
    "Tensor? slot_mapping, Tensor(d!)? k_scale, Tensor(e!)? v_scale) -> ()",
    check=_check,
    triton=_launch,
    reference=reference.fused_qkv_rope,
    debug_check=_debug_check,
)


def fused_qkv_rope(
    x: torch.Tensor,
    weight: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    bias: torch.Tensor | None = None,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    is_neox: bool = True,
    k_cache: torch.Tensor | None = None,
    v_cache: torch.Tensor | None = None,
    slot_mapping: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """An attention layer from its input to the attention itself: `fused_qk_norm_rope_cache` of the
    QKV projection, in one kernel.

    x: [tokens, K], fp16, bf16 or fp32. weight: [(num_heads + 2 * num_kv_heads) * head_dim, K], the
    rows of queries, keys and values; bias: one value a row, or None. All of one dtype, last
    dimension contiguous, any row strides. fp32 is multiplied exactly (no TF32).
    All other arguments are those of `fused_qk_norm_rope_cache`.

    Meant for up to 64 tokens and weights with more than a quarter as many rows as columns, or with
    norms or codes, which keep a head in one program, at least as many: it reads the weights once.
    All else is right but slower than a library's GEMM and that op.

    Returns `out`, [tokens, weight rows] of x's dtype, allocated unless given: queries and keys,
    normed and rotated, and values. They are rounded once.
    Raises ValueError or TypeError for shapes, strides, devices or dtypes that do not fit, and for
    float8_e4m3fn caches on a GPU without it.
    """
    if out is None:
        check_dim("x", x, 2)
        check_dim("weight", weight, 2)
        out = x.new_empty(x.shape[0], weight.shape[0])
    _fused_qkv_rope(
        out,
        x,
        weight,
        bias,
        positions,
        cos_sin_cache,
        q_weight,
        k_weight,
        eps,
        num_heads,
        num_kv_heads,
        head_dim,
        is_neox,
        k_cache,
        v_cache,
        slot_mapping,
        k_scale,
        v_scale,
    )
    return out
