"""Writes of new keys and values into the pages of the KV cache.

    k_cache[slot // page_size, slot % page_size] = key[token]        slot = slot_mapping[token]

and the same for the values: bits are copied. A cache of codes (int8, float8_e4m3fn) receives each
head quantised, and its scale goes to k_scale[slot // page_size, slot % page_size, head] (see
quant/_row.py). `k_cache`, `v_cache`, `k_scale` and `v_scale` are mutated.

key: [tokens, kv_heads, head_dim], k_cache: [num_pages, page_size, kv_heads, head_dim].
A slot below 0 marks a token that is not stored (padding); one beyond the cache is ignored as well.
Of tokens that share a slot any may win, head by head.
"""

import torch
import triton
import triton.language as tl

from echokernels._checks import (
    FLOATS,
    check_dim,
    check_dtype,
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
from echokernels.attention._arguments import check_page_write, check_slots, scale_strides
from echokernels.quant._row import check_has_casts, encode, largest, magnitude, row_scale_of


# slot_mapping may be a slice at any offset of a larger buffer, so its alignment varies at run time.
@triton.jit(do_not_specialize=["slot_mapping_ptr"])
def _reshape_and_cache_kernel(
    key_ptr,  # [tokens, KV_HEADS, HEAD_DIM]
    value_ptr,  # [tokens, KV_HEADS, V_HEAD_DIM]
    k_cache_ptr,  # [num_pages, PAGE_SIZE, KV_HEADS, HEAD_DIM]
    v_cache_ptr,  # [num_pages, PAGE_SIZE, KV_HEADS, V_HEAD_DIM]
    slot_mapping_ptr,  # int[tokens]
    k_scale_ptr,  # f32[num_pages, PAGE_SIZE, KV_HEADS], or None: bits are copied
    v_scale_ptr,  # likewise
    num_slots,
    key_stride_token,
    key_stride_head,
    value_stride_token,
    value_stride_head,
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
    PAGE_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    HEAD_TILES: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EVICTION: tl.constexpr,
    PDL: tl.constexpr,
):
    token = (tl.program_id(0) // HEAD_TILES).to(tl.int64)
    head = ((tl.program_id(0) % HEAD_TILES) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    k_mask = (head < KV_HEADS) & (column < HEAD_DIM)
    v_mask = (head < KV_HEADS) & (column < V_HEAD_DIM)
    k_ptr = key_ptr + token * key_stride_token + head * key_stride_head + column
    v_ptr = value_ptr + token * value_stride_token + head * value_stride_head + column

    wait_for_previous(PDL)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    # On their way before the first instruction that waits for the slot.
    if k_scale_ptr is None:
        k = tl.load(k_ptr, mask=k_mask, eviction_policy=EVICTION)
        v = tl.load(v_ptr, mask=v_mask, eviction_policy=EVICTION)
    else:
        # 0 beyond the head: its maximum is taken.
        k = tl.load(k_ptr, mask=k_mask, other=0.0, eviction_policy=EVICTION)
        v = tl.load(v_ptr, mask=v_mask, other=0.0, eviction_policy=EVICTION)
    let_next_start(PDL)

    if (slot >= 0) & (slot < num_slots):
        page, offset = slot // PAGE_SIZE, slot % PAGE_SIZE
        k_slot_ptr = k_cache_ptr + page * k_cache_stride_page + offset * k_cache_stride_slot
        v_slot_ptr = v_cache_ptr + page * v_cache_stride_page + offset * v_cache_stride_slot
        if k_scale_ptr is None:
            tl.store(k_slot_ptr + head * k_cache_stride_head + column, k, mask=k_mask)
            tl.store(v_slot_ptr + head * v_cache_stride_head + column, v, mask=v_mask)
        else:
            k_codes_ptr = k_slot_ptr + head * k_cache_stride_head + column
            v_codes_ptr = v_slot_ptr + head * v_cache_stride_head + column
            k_scales_ptr = k_scale_ptr + page * k_scale_stride_page + offset * k_scale_stride_slot
            v_scales_ptr = v_scale_ptr + page * v_scale_stride_page + offset * v_scale_stride_slot
            k_scales_ptr += head * k_scale_stride_head
            v_scales_ptr += head * v_scale_stride_head
            _store_codes(k_codes_ptr, k_mask, k_scales_ptr, head < KV_HEADS, k)
            _store_codes(v_codes_ptr, v_mask, v_scales_ptr, head < KV_HEADS, v)


@triton.jit
def _store_codes(code_ptrs, mask, scale_ptrs, head_mask, heads):
    """Heads [heads, columns], 0 beyond `mask`, quantised; `scale_ptrs` and `head_mask` are
    [heads, 1]."""
    CODE: tl.constexpr = code_ptrs.dtype.element_ty
    heads = heads.to(tl.float32)
    scale = row_scale_of(largest(magnitude(heads))[:, None], CODE)
    tl.store(scale_ptrs, scale, mask=head_mask)
    tl.store(code_ptrs, encode(heads, scale, CODE), mask=mask)


def _config(kv_heads: int, head_dim: int) -> TileConfig:
    block_d = triton.next_power_of_2(head_dim)
    # 1,024 elements of K and of V over 4 warps: a thread copies 16 bytes of both if they are bf16.
    block_h = min(triton.next_power_of_2(kv_heads), max(1, 1024 // block_d))
    num_warps = min(max(block_h * block_d // 256, 1), 4)
    return TileConfig(block_h, block_d, num_warps)


def _check(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    check_dim("key", key, 3)
    check_dtype("key", key, FLOATS)
    tokens, kv_heads, head_dim = key.shape
    check_shape("value", value, tokens, kv_heads, None)
    check_dtype("value", value, (key.dtype,))
    check_last_contiguous("key", key)
    check_last_contiguous("value", value)
    check_same_device("key", key, value=value)
    rows = (tokens, kv_heads, head_dim, value.shape[2])
    check_page_write(k_cache, v_cache, slot_mapping, k_scale, v_scale, ("key", key), rows)


def _debug_check(
    key: torch.Tensor,  # noqa: ARG001
    value: torch.Tensor,  # noqa: ARG001
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,  # noqa: ARG001
    slot_mapping: torch.Tensor,
    *_scales: torch.Tensor | None,
) -> None:
    check_slots(k_cache, slot_mapping)


def _launch(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    check_has_casts("k_cache", k_cache)
    num_pages, page_size, kv_heads, head_dim = k_cache.shape
    v_head_dim = v_cache.shape[3]
    width = max(head_dim, v_head_dim)
    config = select("reshape_and_cache", (kv_heads, width), lambda: _config(kv_heads, width))
    head_tiles = triton.cdiv(kv_heads, config.block_m)
    launch(
        _reshape_and_cache_kernel,
        (slot_mapping.shape[0] * head_tiles,),
        key,
        value,
        k_cache,
        v_cache,
        slot_mapping,
        k_scale,
        v_scale,
        num_pages * page_size,
        *key.stride()[:2],
        *value.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        *scale_strides(k_scale),
        *scale_strides(v_scale),
        PAGE_SIZE=page_size,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        V_HEAD_DIM=v_head_dim,
        HEAD_TILES=head_tiles,
        BLOCK_H=config.block_m,
        BLOCK_D=config.block_n,
        EVICTION=eviction_of(key, value),
        num_warps=config.num_warps,
        **early_launch(key.device),
    )


_reshape_and_cache = define_op(
    "reshape_and_cache(Tensor key, Tensor value, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor slot_mapping, Tensor(c!)? k_scale, Tensor(d!)? v_scale) -> ()",
    check=_check,
    triton=_launch,
    reference=reference.reshape_and_cache,
    debug_check=_debug_check,
)


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Writes each token's key and value to its slot of the caches, in place.

    key: [tokens, kv_heads, head_dim], value: [tokens, kv_heads, v_head_dim], fp16, bf16 or fp32;
    they may be views of a packed QKV tensor.
    k_cache, v_cache: [num_pages, page_size, kv_heads, head_dim or v_head_dim], any strides, so they
    may be permuted head-major caches. All last dimensions are contiguous. Of the same dtype they
    receive the very bits; of int8 or float8_e4m3fn, codes: each head is quantised by itself, as
    `quantize_int8` does it.
    slot_mapping: int32 or int64 [tokens], slot = page * page_size + offset. A negative slot is
    skipped; so is one beyond the cache, which ECHOKERNELS_DEBUG=1 refuses with ValueError. Which of
    several tokens with one slot remains is undefined and may differ from head to head; codes may
    then meet another token's scale.
    k_scale, v_scale: float32 [num_pages, page_size, kv_heads], any strides, which receive the
    scales of codes; None for caches of anything else. Slots that are not written keep theirs.

    Raises ValueError or TypeError for shapes, strides, devices or dtypes that do not fit, and for
    float8_e4m3fn on a GPU without it.
    """
    _reshape_and_cache(key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale)
