"""Plain PyTorch forms of the attention ops: their definition, the tests' oracle and the CPU
implementation.

Arithmetic is in float32, or float64 when the inputs are float64. Only keys of the sequence are
gathered, so nothing in unused memory reaches the output.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from echokernels._reference import accumulable, linear
from echokernels.quant.reference import quantise_rows


def flash_attn_varlen(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    block_table: torch.Tensor | None,
    max_seqlen_q: int,  # noqa: ARG001
    max_seqlen_k: int,  # noqa: ARG001
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    bounds = cu_seqlens_q.tolist()
    k_starts = None if cu_seqlens_k is None else cu_seqlens_k.tolist()
    if seqused_k is not None:
        k_lens = seqused_k.tolist()
    else:
        assert k_starts is not None
        k_lens = [end - start for start, end in pairwise(k_starts)]

    def keys_of(seq: int) -> list[torch.Tensor]:
        if block_table is not None:
            pages = (k, k_scale), (v, v_scale)
            return [_gather(*each, block_table[seq], k_lens[seq]) for each in pages]
        assert k_starts is not None
        return [x.narrow(0, k_starts[seq], k_lens[seq]) for x in (k, v)]

    window = (window_left, 0 if causal else window_right)
    _attend_each(out, lse, q, bounds, keys_of, window, softmax_scale, softcap, alibi_slopes, sinks)


def paged_attention(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seqused_k: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    max_seqlen_q: int,  # noqa: ARG001
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    num_splits: int,  # noqa: ARG001
    kv_split_size: int,  # noqa: ARG001
    workspace: torch.Tensor | None,  # noqa: ARG001
) -> None:
    k_lens = seqused_k.tolist()
    bounds = range(len(k_lens) + 1) if cu_seqlens_q is None else cu_seqlens_q.tolist()

    def keys_of(seq: int) -> list[torch.Tensor]:
        pages = (k_cache, k_scale), (v_cache, v_scale)
        return [_gather(*each, block_table[seq], k_lens[seq]) for each in pages]

    window = (window_left, 0 if causal else window_right)
    _attend_each(out, lse, q, bounds, keys_of, window, softmax_scale, softcap, alibi_slopes, sinks)


def merge_attn_states(
    out: torch.Tensor,
    out_lse: torch.Tensor | None,
    prefix_out: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_out: torch.Tensor,
    suffix_lse: torch.Tensor,
) -> None:
    lses = torch.stack([prefix_lse, suffix_lse])
    top = lses.amax(0)
    weights = torch.exp(lses - torch.where(top.isneginf(), 0.0, top))
    total = weights.sum(0)
    outs = torch.stack([prefix_out, suffix_out]).to(weights.dtype)
    shares = (weights / torch.where(total == 0, 1.0, total)).transpose(1, 2)[..., None]
    out.copy_(torch.where(shares > 0, outs * shares, 0.0).sum(0))
    if out_lse is not None:
        out_lse.copy_(top + total.log())


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    num_pages, page_size = k_cache.shape[:2]
    num_slots = num_pages * page_size
    token = ((slot_mapping >= 0) & (slot_mapping < num_slots)).nonzero().squeeze(1)
    slot = slot_mapping[token]
    page, offset = slot // page_size, slot % page_size
    for cache, scales, new in ((k_cache, k_scale, key), (v_cache, v_scale, value)):
        if scales is None:
            cache[page, offset] = new[token]
        else:
            codes, scale = _quantised(new[token], cache.dtype)
            cache[page, offset] = codes
            scales[page, offset] = scale


def _quantised(rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales) of rows."""
    codes = torch.empty_like(rows, dtype=dtype)
    scale = rows.new_empty(rows.shape[:-1], dtype=torch.float32)
    quantise_rows(codes, scale, accumulable(rows))
    return codes, scale


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_dim: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> None:
    max_position, rotary_dim = cos_sin_cache.shape
    if max_position == 0:
        return
    row = positions.clamp(0, max_position - 1)
    in_table = (row == positions)[:, None, None]
    cos, sin = cos_sin_cache[row][:, None, :].chunk(2, dim=-1)
    for tensor in (query, key):
        if tensor is None:
            continue
        heads = tensor if tensor.dim() == 3 else _split_heads(tensor, head_dim)
        if is_neox:
            first, second = heads[..., :rotary_dim].chunk(2, dim=-1)
        else:
            first, second = heads[..., 0:rotary_dim:2], heads[..., 1:rotary_dim:2]
        x, y = accumulable(first), accumulable(second)
        rotated_x = torch.where(in_table, x * cos - y * sin, x)
        rotated_y = torch.where(in_table, y * cos + x * sin, y)
        first.copy_(rotated_x)
        second.copy_(rotated_y)


def fused_qk_norm_rope_cache(
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
    q, k, v = _split_qkv(qkv, num_heads, num_kv_heads, head_dim)
    in_table = ((positions >= 0) & (positions < cos_sin_cache.shape[0]))[:, None, None]
    for heads, weight in ((q, q_weight), (k, k_weight)):
        if weight is None:
            rotary_embedding(positions, heads, None, head_dim, cos_sin_cache, is_neox)
            continue
        new = accumulable(heads)
        new = torch.nn.functional.rms_norm(new, (head_dim,), weight.to(new.dtype), eps)
        rotary_embedding(positions, new, None, head_dim, cos_sin_cache, is_neox)
        heads.copy_(torch.where(in_table, new.to(heads.dtype), heads))
    _write_if_paged(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)


def fused_qkv_rope(
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
    exact = linear(x, weight, bias)
    fused_qk_norm_rope_cache(
        exact, positions, cos_sin_cache, q_weight, k_weight, eps, num_heads, num_kv_heads,
        head_dim, is_neox, None, None, None, None, None,
    )  # fmt: skip
    qkv.copy_(exact)
    # What the caches receive is rounded already.
    _, k, v = _split_qkv(qkv, num_heads, num_kv_heads, head_dim)
    _write_if_paged(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)


def _write_if_paged(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor | None,
    v_cache: torch.Tensor | None,
    slot_mapping: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    if k_cache is not None and v_cache is not None and slot_mapping is not None:
        reshape_and_cache(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)


def _gather(
    pages: torch.Tensor, scale: torch.Tensor | None, table: torch.Tensor, num_keys: int
) -> torch.Tensor:
    """[num_keys, kv_heads, head_dim] of one sequence from [num_pages, page_size, ...]; of codes,
    what they stand for in fp32."""
    used = table[: -(-num_keys // pages.shape[1])]
    rows = pages.index_select(0, used).flatten(0, 1)[:num_keys]
    if scale is None:
        return rows
    return rows.float() * _gather(scale, None, table, num_keys)[..., None]


def _attend_each(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    bounds: Sequence[int],  # of the sequences' queries
    keys_of: Callable[[int], Sequence[torch.Tensor]],  # a sequence's (keys, values)
    window: tuple[int, int],
    scale: float,
    softcap: float,
    alibi_slopes: torch.Tensor | None,  # [heads] or [num_seqs, heads]
    sinks: torch.Tensor | None,  # [heads]
) -> None:
    """Sequence by sequence: padding all to the longest costs more than the calls it saves."""
    for seq, (start, end) in enumerate(pairwise(bounds)):
        if start == end:
            continue
        keys, values = keys_of(seq)
        _attend(
            out[start:end],
            None if lse is None else lse[:, start:end],
            q[start:end],
            keys,
            values,
            window,
            scale,
            softcap,
            _of_sequence(alibi_slopes, seq),
            sinks,
        )


def _attend(
    out: torch.Tensor,  # [queries, heads, head_dim]
    lse: torch.Tensor | None,  # [heads, queries]
    q: torch.Tensor,  # [queries, heads, head_dim]
    k: torch.Tensor,  # [keys, kv_heads, head_dim]
    v: torch.Tensor,
    window: tuple[int, int],
    scale: float,
    softcap: float,
    alibi_slopes: torch.Tensor | None,  # [heads]
    sinks: torch.Tensor | None,  # [heads]
) -> None:
    """One sequence: writes `out` and `lse`."""
    queries, keys, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    # [kv_heads, group * queries, head_dim]: a KV head's group are more queries of it.
    rows = q.unflatten(1, (-1, group)).permute(1, 2, 0, 3).flatten(1, 2).to(dtype)
    k, v = (t.transpose(0, 1).to(dtype) for t in (k, v))
    mask = _visible(queries, keys, window)
    is_plain = softcap == 0 and alibi_slopes is None and sinks is None
    if is_plain and lse is None and queries <= keys:
        # The usual case: PyTorch's fused attention, which wants a visible key for every query.
        tiled = None if mask is None else mask.repeat(group, 1)
        result = torch.nn.functional.scaled_dot_product_attention(
            rows[None], k[None], v[None], attn_mask=tiled, scale=scale
        )[0]
    else:
        scores = rows @ k.transpose(1, 2) * scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        if alibi_slopes is not None:
            position = torch.arange(keys - queries, keys, device=q.device)
            distance = (position[:, None] - torch.arange(keys, device=q.device)).abs()
            bias = alibi_slopes.to(dtype).view(-1, group, 1, 1) * distance
            scores -= bias.flatten(1, 2)
        if mask is not None:
            scores = scores.masked_fill(~mask.repeat(group, 1), float("-inf"))
        row_sinks = None
        if sinks is not None:
            row_sinks = sinks.to(dtype).view(-1, group).repeat_interleave(queries, 1)
        result, row_lse = _softmax_product(scores, v, row_sinks)
        if lse is not None:
            lse.copy_(row_lse.reshape(-1, queries))
    out.copy_(result.unflatten(1, (group, queries)).permute(2, 0, 1, 3).flatten(1, 2))


def _of_sequence(alibi_slopes: torch.Tensor | None, seq: int) -> torch.Tensor | None:
    """[heads]"""
    return alibi_slopes if alibi_slopes is None or alibi_slopes.dim() == 1 else alibi_slopes[seq]


def _softmax_product(
    scores: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(softmax(scores) v, logsumexp(scores)), where a row's sink is one more score, without a
    value; 0 and -inf for rows without a finite score."""
    lse = scores.logsumexp(-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks)
    weights = torch.exp(scores - torch.where(lse.isneginf(), 0.0, lse)[..., None])
    return weights @ v, lse


def _visible(queries: int, keys: int, window: tuple[int, int]) -> torch.Tensor | None:
    """bool[queries, keys], or None where every query sees every key."""
    left, right = window
    first, last = keys - queries, keys - 1  # where the first and the last query stand
    if (left < 0 or last - left <= 0) and (right < 0 or first + right >= last):
        return None
    position = torch.arange(first, keys)[:, None]
    key = torch.arange(keys)
    visible = torch.ones(queries, keys, dtype=torch.bool)
    if left >= 0:
        visible &= key >= position - left
    if right >= 0:
        visible &= key <= position + right
    return visible


def _split_heads(x: torch.Tensor, head_dim: int) -> torch.Tensor:
    return x.view(x.shape[0], x.shape[1] // head_dim, head_dim)


def _split_qkv(
    qkv: torch.Tensor, num_heads: int, num_kv_heads: int, head_dim: int
) -> tuple[torch.Tensor, ...]:
    """Views of query, key and value, each [tokens, heads, head_dim]."""
    return _split_heads(qkv, head_dim).split([num_heads, num_kv_heads, num_kv_heads], dim=1)
