"""QK-norm, RoPE and page write in one pass over a packed QKV projection, in place.

    q' = rope(q / sqrt(mean(q^2) + eps) * q_weight)         each head alone; the norm only if there
    k' = rope(k / sqrt(mean(k^2) + eps) * k_weight)         is a weight
    k_cache[slot] = k'      v_cache[slot] = v               if there are caches; codes and scales
                                                            for caches of codes

The columns of `qkv` are num_heads query heads, then num_kv_heads key heads, then as many value
heads, each head_dim wide. Query and key heads are replaced, value heads stay. RoPE and its table
are those of rope.py, slots those of kv_cache.py. Everything between is in fp32: q' and k' are
rounded once, where rms_norm followed by rotary_embedding rounds twice. What is quantised is the
rounded head, so that codes are those of reshape_and_cache. `qkv`, the caches and their scales are
mutated.

A token whose position lies outside the table is padding: its heads stay as they are, un-normed too.
"""

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from echokernels._checks import (
    FLOATS,
    check_absent,
    check_dtype,
    check_indices,
    check_last_contiguous,
    check_range,
    check_same_device,
    check_shape,
)
from echokernels._l2 import eviction_of
from echokernels._launch import launch
from echokernels._library import define_op
from echokernels._pdl import early_launch, let_next_start, wait_for_previous
from echokernels._tuning import TileConfig, select
from echokernels.attention import reference
from echokernels.attention._arguments import (
    check_page_write,
    check_rotary,
    check_slots,
    scale_strides,
)
from echokernels.attention._rotary import (
    heads_of,
    load_angles,
    load_heads,
    load_weight,
    normalise_heads,
    rotate_heads,
    store_codes,
    store_heads,
)
from echokernels.quant._row import check_has_casts


# positions and slot_mapping may be slices at any offset of larger buffers, so their alignment
# varies at run time.
@triton.jit(do_not_specialize=["positions_ptr", "slot_mapping_ptr"])
def _fused_qk_norm_rope_cache_kernel(
    qkv_ptr,  # [tokens, Q.number + K.number + V.number, HEAD_DIM], in and out
    positions_ptr,  # int[tokens]
    cos_sin_ptr,  # f32[max_position, 2 * Q.half]
    q_weight_ptr,  # [HEAD_DIM], or None: no norm
    k_weight_ptr,  # [HEAD_DIM], or None: no norm
    k_cache_ptr,  # [num_pages, PAGE_SIZE, K.number, HEAD_DIM], or None
    v_cache_ptr,  # [num_pages, PAGE_SIZE, V.number, HEAD_DIM], or None
    slot_mapping_ptr,  # int[tokens], or None
    k_scale_ptr,  # f32[num_pages, PAGE_SIZE, K.number], or None: the caches are no codes
    v_scale_ptr,  # likewise
    max_position,
    num_slots,
    eps,
    qkv_stride,
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
    Q: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PROGRAMS: tl.constexpr,  # of one token
    EVICTION: tl.constexpr,
    PDL: tl.constexpr,
):
    token = (tl.program_id(0) // PROGRAMS).to(tl.int64)
    part = tl.program_id(0) % PROGRAMS
    q_ptr = qkv_ptr + token * qkv_stride
    k_ptr = q_ptr + Q.number * HEAD_DIM
    v_ptr = k_ptr + K.number * HEAD_DIM

    wait_for_previous(PDL)
    position = tl.load(positions_ptr + token).to(tl.int64)
    # All heads are on their way before the first instruction that waits for the position.
    q = load_heads(q_ptr, HEAD_DIM, part, Q.number, Q, EVICTION)
    k = load_heads(k_ptr, HEAD_DIM, part, K.number, K, EVICTION)
    if q_weight_ptr is not None:
        q_weight = load_weight(q_weight_ptr, Q)
    if k_weight_ptr is not None:
        k_weight = load_weight(k_weight_ptr, K)
    if k_cache_ptr is not None:
        v = load_heads(v_ptr, HEAD_DIM, part, V.number, V, EVICTION)
        slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    let_next_start(PDL)

    if k_cache_ptr is not None:
        is_stored = (slot >= 0) & (slot < num_slots)
        page, offset = slot // PAGE_SIZE, slot % PAGE_SIZE
        if is_stored:
            # Values need not wait for the table.
            v_page_ptr = v_cache_ptr + page * v_cache_stride_page + offset * v_cache_stride_slot
            if v_scale_ptr is None:
                store_heads(v_page_ptr, v_cache_stride_head, part, V.number, v, V)
            else:
                v_scales_ptr = (
                    v_scale_ptr + page * v_scale_stride_page + offset * v_scale_stride_slot
                )
                store_codes(
                    v_page_ptr, v_cache_stride_head, v_scales_ptr, v_scale_stride_head,
                    part, V.number, v, V,
                )  # fmt: skip
    if (position >= 0) & (position < max_position):
        cos, sin = load_angles(cos_sin_ptr + position * cos_sin_stride, Q)
        dtype: tl.constexpr = qkv_ptr.dtype.element_ty
        new_q, new_k = q, k
        if q_weight_ptr is not None:
            new_q = normalise_heads(q, q_weight, eps, Q)
        q = rotate_heads(new_q, cos, sin, dtype)
        store_heads(q_ptr, HEAD_DIM, part, Q.number, q, Q)
        if k_weight_ptr is not None:
            new_k = normalise_heads(k, k_weight, eps, K)
        k = rotate_heads(new_k, cos, sin, dtype)
        store_heads(k_ptr, HEAD_DIM, part, K.number, k, K)
    if k_cache_ptr is not None:
        if is_stored:
            k_page_ptr = k_cache_ptr + page * k_cache_stride_page + offset * k_cache_stride_slot
            if k_scale_ptr is None:
                store_heads(k_page_ptr, k_cache_stride_head, part, K.number, k, K)
            else:
                k_scales_ptr = (
                    k_scale_ptr + page * k_scale_stride_page + offset * k_scale_stride_slot
                )
                store_codes(
                    k_page_ptr, k_cache_stride_head, k_scales_ptr, k_scale_stride_head,
                    part, K.number, k, K,
                )  # fmt: skip


def _config(head_dim: int) -> TileConfig:
    block_d = triton.next_power_of_2(head_dim)
    # 2,048 columns of queries, with their part of keys and values, over one warp: on an H200 two
    # warps were a tenth slower for 16,384 tokens, though a little faster for a few.
    return TileConfig(max(1, 2048 // block_d), block_d, num_warps=1)


def check(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    is_neox: bool,  # noqa: ARG001
    k_cache: torch.Tensor | None,
    v_cache: torch.Tensor | None,
    slot_mapping: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    check_range("num_heads", num_heads, 1)
    check_range("num_kv_heads", num_kv_heads, 1)
    check_range("eps", eps, 0.0)
    check_rotary(positions, cos_sin_cache, head_dim)
    tokens = positions.shape[0]
    check_shape("qkv", qkv, tokens, (num_heads + 2 * num_kv_heads) * head_dim)
    check_dtype("qkv", qkv, FLOATS)
    check_last_contiguous("qkv", qkv)
    weights = {"q_weight": q_weight, "k_weight": k_weight}
    for name, weight in weights.items():
        if weight is not None:
            check_shape(name, weight, head_dim)
            check_dtype(name, weight, FLOATS)
            check_last_contiguous(name, weight)
    check_same_device("qkv", qkv, positions=positions, cos_sin_cache=cos_sin_cache, **weights)
    if k_cache is not None and v_cache is not None and slot_mapping is not None:
        rows = (tokens, num_kv_heads, head_dim, head_dim)
        check_page_write(k_cache, v_cache, slot_mapping, k_scale, v_scale, ("qkv", qkv), rows)
    else:
        together = "k_cache, v_cache and slot_mapping are given together or not at all"
        check_absent("k_cache", k_cache, together)
        check_absent("v_cache", v_cache, together)
        check_absent("slot_mapping", slot_mapping, together)
        check_absent("k_scale", k_scale, "k_cache is None")
        check_absent("v_scale", v_scale, "v_cache is None")


def debug_check(
    qkv: torch.Tensor,  # noqa: ARG001
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    *others: Any,
) -> None:
    check_indices("positions", positions, 0, cos_sin_cache.shape[0])
    *_, k_cache, _v_cache, slot_mapping, _k_scale, _v_scale = others
    if slot_mapping is not None:
        check_slots(k_cache, slot_mapping)


def _launch(
    qkv: torch.Tensor,
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
    max_position, rotary_dim = cos_sin_cache.shape
    half = rotary_dim // 2
    config = select("fused_qk_norm_rope_cache", head_dim, lambda: _config(head_dim))
    programs = triton.cdiv(max(num_heads, num_kv_heads), config.block_m)
    heads = partial(heads_of, config, programs)
    k_has_rest = k_weight is not None or k_cache is not None
    num_pages, page_size = (0, 1) if k_cache is None else k_cache.shape[:2]
    launch(
        _fused_qk_norm_rope_cache_kernel,
        (qkv.shape[0] * programs,),
        qkv,
        positions,
        cos_sin_cache,
        q_weight,
        k_weight,
        k_cache,
        v_cache,
        slot_mapping,
        k_scale,
        v_scale,
        max_position,
        num_pages * page_size,
        eps,
        qkv.stride(0),
        cos_sin_cache.stride(0),
        *((0, 0, 0) if k_cache is None else k_cache.stride()[:3]),
        *((0, 0, 0) if v_cache is None else v_cache.stride()[:3]),
        *scale_strides(k_scale),
        *scale_strides(v_scale),
        Q=heads(num_heads, head_dim, half, is_neox, has_rest=q_weight is not None),
        K=heads(num_kv_heads, head_dim, half, is_neox, has_rest=k_has_rest),
        V=heads(num_kv_heads, head_dim, head_dim // 2, is_neox=True, has_rest=True),
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        PROGRAMS=programs,
        EVICTION=eviction_of(qkv),
        num_warps=config.num_warps,
        **early_launch(qkv.device),
    )


_fused_qk_norm_rope_cache = define_op(
    "fused_qk_norm_rope_cache(Tensor(a!) qkv, Tensor positions, Tensor cos_sin_cache, "
    "Tensor? q_weight, Tensor? k_weight, float eps, int num_heads, int num_kv_heads, "
    "int head_dim, bool is_neox, Tensor(b!)? k_cache, Tensor(c!)? v_cache, "
    "Tensor? slot_mapping, Tensor(d!)? k_scale, Tensor(e!)? v_scale) -> ()",
    check=check,
    triton=_launch,
    reference=reference.fused_qk_norm_rope_cache,
    debug_check=debug_check,
)


def fused_qk_norm_rope_cache(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
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
) -> torch.Tensor:
    """Norms and rotates the query and key heads of `qkv` in place, and writes keys and values to
    their slots of the caches, in one launch. Returns `qkv`.

    qkv: [tokens, (num_heads + 2 * num_kv_heads) * head_dim], fp16, bf16 or fp32, last dimension
    contiguous. Query heads first, then key heads, then value heads, which do not change.
    positions, cos_sin_cache, is_neox: as in `rotary_embedding`. A token whose position lies outside
    the table keeps its heads as they are, un-normed too.
    q_weight, k_weight: [head_dim], of RMSNorm over each head. Without one its heads are not normed.
    k_cache, v_cache, slot_mapping: as in `reshape_and_cache`, all or none. Caches of `qkv`'s dtype
    receive the very bits that `qkv` holds afterwards, those of int8 or float8_e4m3fn their codes.
    k_scale, v_scale: as in `reshape_and_cache`: float32 for codes, else None.

    Heads are rounded once. So without weights the result equals `rotary_embedding` and
    `reshape_and_cache` bit for bit, and with them it is closer to the exact one than after
    `rms_norm`, which rounds as well.

    Raises ValueError or TypeError for shapes, strides, devices or dtypes that do not fit, and for
    float8_e4m3fn on a GPU without it.
    """
    _fused_qk_norm_rope_cache(
        qkv,
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
    return qkv
