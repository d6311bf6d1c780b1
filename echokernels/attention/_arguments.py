"""Checks that the attention ops share."""

import torch

from echokernels._checks import (
    FLOATS,
    INDEX,
    check_absent,
    check_dim,
    check_dtype,
    check_indices,
    check_last_contiguous,
    check_range,
    check_same_device,
    check_shape,
)

MAX_HEAD_DIM = 256
CODES = (torch.int8, torch.float8_e4m3fn)
"""Dtypes of quantised caches, which have a scale for each token and KV head."""


def check_queries(
    out: torch.Tensor, lse: torch.Tensor | None, q: torch.Tensor, softmax_scale: float
) -> None:
    """q, out: [tokens, heads, head_dim]; lse: [heads, tokens]."""
    check_dim("q", q, 3)
    check_dtype("q", q, FLOATS)
    check_last_contiguous("q", q)
    tokens, heads, head_dim = q.shape
    if head_dim % 8 or not 8 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(
            f"q.shape is {tuple(q.shape)}, "
            f"must end in a head_dim that is a multiple of 8 up to {MAX_HEAD_DIM}"
        )
    check_shape("out", out, tokens, heads, head_dim)
    check_dtype("out", out, (q.dtype,))
    check_last_contiguous("out", out)
    if lse is not None:
        check_shape("lse", lse, heads, tokens)
        check_dtype("lse", lse, (torch.float32,))
    if not abs(softmax_scale) < float("inf"):
        raise ValueError(f"softmax_scale is {softmax_scale}, must be finite")
    check_same_device("q", q, out=out, lse=lse)


def check_keys(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    names: tuple[str, str],
    dtypes: tuple[torch.dtype, ...] = (),
) -> None:
    """k, v: [..., kv_heads, head_dim] of q's dtype or one of `dtypes`, heads of q divisible by
    kv_heads."""
    for name, tensor in zip(names, (k, v), strict=True):
        check_dim(name, tensor, k.dim())
        check_dtype(name, tensor, (q.dtype, *dtypes))
        check_shape(name, tensor, *k.shape[:-1], q.shape[2])
        check_last_contiguous(name, tensor)
    heads, kv_heads = q.shape[1], k.shape[-2]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"q has {heads} heads and {names[0]} {kv_heads}: "
            "the first must be divisible by the second"
        )
    check_same_device("q", q, **dict(zip(names, (k, v), strict=True)))


def check_cache_scales(
    k: torch.Tensor,
    v: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    names: tuple[str, str] = ("k_cache", "v_cache"),
) -> None:
    """k, v: [num_pages, page_size, kv_heads, head_dim] of one dtype. Of codes, k_scale and v_scale:
    f32[num_pages, page_size, kv_heads], any strides; of anything else, None."""
    check_dtype(names[1], v, (k.dtype,))
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if k.dtype not in CODES:
            check_absent(name, scale, f"{names[0]}.dtype is {k.dtype}, which has no scales")
            continue
        if scale is None:
            raise ValueError(
                f"{name} is None, must be a tensor: {names[0]}.dtype is {k.dtype}, codes that need "
                "scales"
            )
        check_shape(name, scale, *k.shape[:3])
        check_dtype(name, scale, (torch.float32,))
        check_same_device(names[0], k, **{name: scale})


def check_pages(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    seqused_k: torch.Tensor,
    num_seqs: int,
) -> None:
    """block_table: [num_seqs, max_pages]; seqused_k: [num_seqs]."""
    check_dim("k_cache", k_cache, 4)
    _check_page_size(k_cache)
    check_dtype("block_table", block_table, INDEX)
    check_shape("block_table", block_table, num_seqs, None)
    check_last_contiguous("block_table", block_table)
    check_lengths("seqused_k", seqused_k, num_seqs)
    check_same_device("q", q, block_table=block_table, seqused_k=seqused_k)


def check_page_write(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    source: tuple[str, torch.Tensor],
    rows: tuple[int, int, int, int],
) -> None:
    """What receives `rows`, (tokens, kv_heads, head_dim, v_head_dim), of a named tensor: in its
    dtype, or as codes with scales."""
    name, tensor = source
    tokens, kv_heads, head_dim, v_head_dim = rows
    check_shape("k_cache", k_cache, None, None, kv_heads, head_dim)
    num_pages, page_size = k_cache.shape[:2]
    check_shape("v_cache", v_cache, num_pages, page_size, kv_heads, v_head_dim)
    _check_page_size(k_cache)
    check_dtype("k_cache", k_cache, (tensor.dtype, *CODES))
    check_cache_scales(k_cache, v_cache, k_scale, v_scale)
    check_last_contiguous("k_cache", k_cache)
    check_last_contiguous("v_cache", v_cache)
    check_lengths("slot_mapping", slot_mapping, tokens)
    check_same_device(name, tensor, k_cache=k_cache, v_cache=v_cache, slot_mapping=slot_mapping)


def _check_page_size(k_cache: torch.Tensor) -> None:
    if k_cache.shape[1] == 0:
        raise ValueError(
            f"k_cache.shape is {tuple(k_cache.shape)}, must have a page size of at least 1"
        )


def scale_strides(scale: torch.Tensor | None) -> tuple[int | None, ...]:
    """Of a page, a slot and a head: None, which kernels compile away, without scales."""
    return (None, None, None) if scale is None else scale.stride()


def check_rotary(positions: torch.Tensor, cos_sin_cache: torch.Tensor, head_dim: int) -> None:
    """positions: [tokens]; cos_sin_cache: [max_position, rotary_dim]."""
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


def check_lengths(name: str, lengths: torch.Tensor, count: int) -> None:
    """A contiguous vector of `count` indices."""
    check_shape(name, lengths, count)
    check_dtype(name, lengths, INDEX)
    check_last_contiguous(name, lengths)


def check_boundaries(name: str, cu_seqlens: torch.Tensor) -> None:
    """A contiguous vector of num_seqs + 1 offsets."""
    check_dim(name, cu_seqlens, 1)
    if cu_seqlens.shape[0] == 0:
        raise ValueError(f"{name}.shape is (0,), must be (num_seqs + 1)")
    check_dtype(name, cu_seqlens, INDEX)
    check_last_contiguous(name, cu_seqlens)


def check_features(
    window_left: int,
    window_right: int,
    softcap: float,
) -> None:
    check_range("window_left", window_left, -1)
    check_range("window_right", window_right, -1)
    check_range("softcap", softcap, 0.0)


def check_biases(
    q: torch.Tensor, alibi_slopes: torch.Tensor | None, sinks: torch.Tensor | None, num_seqs: int
) -> None:
    """alibi_slopes: f32[heads] or f32[num_seqs, heads]; sinks: [heads]."""
    heads = q.shape[1]
    if alibi_slopes is not None:
        check_dim("alibi_slopes", alibi_slopes, 1, 2)
        check_shape("alibi_slopes", alibi_slopes, *(num_seqs, heads)[-alibi_slopes.dim() :])
        check_dtype("alibi_slopes", alibi_slopes, (torch.float32,))
        check_last_contiguous("alibi_slopes", alibi_slopes)
    if sinks is not None:
        check_shape("sinks", sinks, heads)
        check_dtype("sinks", sinks, FLOATS)
        check_last_contiguous("sinks", sinks)
    check_same_device("q", q, alibi_slopes=alibi_slopes, sinks=sinks)


def alibi_stride(alibi_slopes: torch.Tensor | None) -> int:
    """From one sequence's slopes to the next one's: 0 if all share them."""
    return 0 if alibi_slopes is None or alibi_slopes.dim() == 1 else alibi_slopes.stride(0)


def check_page_ids(
    k_cache: torch.Tensor, block_table: torch.Tensor, seqused_k: torch.Tensor
) -> None:
    """Reads them: every sequence's keys must lie in pages that exist. For a `debug_check`."""
    num_pages, page_size = k_cache.shape[:2]
    columns = block_table.shape[1]
    check_indices("seqused_k", seqused_k, 0, columns * page_size + 1)
    first_key = torch.arange(columns, device=block_table.device) * page_size
    check_indices("block_table", block_table[first_key < seqused_k[:, None]], 0, num_pages)


def check_slots(k_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Reads them: none may lie beyond the cache; any below 0 is padding. For a `debug_check`."""
    num_slots = k_cache.shape[0] * k_cache.shape[1]
    check_indices("slot_mapping", slot_mapping, torch.iinfo(slot_mapping.dtype).min, num_slots)


def check_offsets(name: str, cu_seqlens: torch.Tensor, num_rows: int, longest: int) -> None:
    """Reads them: they must ascend within the rows, by `longest` at most. For a `debug_check`."""
    check_indices(name, cu_seqlens, 0, num_rows + 1)
    check_indices(f"the lengths of {name}", cu_seqlens.diff(), 0, longest + 1)
