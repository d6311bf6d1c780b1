"""Plain PyTorch forms of the attention ops: their definition, the tests' oracle and the CPU
implementation.

Arithmetic is in float32, or float64 when the inputs are float64. Keys that a query does not see
have their values replaced by 0 (never multiplied by 0), so nothing in unused memory reaches the
output.
"""

from itertools import pairwise

import torch

from echokernels._checks import check_indices


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
    alibi_slopes: torch.Tensor | None,  # noqa: ARG001
    sinks: torch.Tensor | None,  # noqa: ARG001
    k_scale: torch.Tensor | None,  # noqa: ARG001
    v_scale: torch.Tensor | None,  # noqa: ARG001
) -> None:
    # Sequence by sequence: prompts are long and of different lengths, so padding them would cost
    # more.
    q_bounds = cu_seqlens_q.tolist()
    k_starts = [0] * len(q_bounds) if cu_seqlens_k is None else cu_seqlens_k.tolist()
    if seqused_k is not None:
        k_lens = seqused_k.tolist()
    else:
        k_lens = [end - start for start, end in pairwise(k_starts)]
    for seq, (start, end) in enumerate(pairwise(q_bounds)):
        if start == end:
            continue
        if block_table is None:
            keys = k[k_starts[seq] : k_starts[seq] + k_lens[seq]]
            values = v[k_starts[seq] : k_starts[seq] + k_lens[seq]]
        else:
            pages = block_table[seq, : -(-k_lens[seq] // k.shape[1])]
            keys = k[pages].flatten(0, 1)[: k_lens[seq]]
            values = v[pages].flatten(0, 1)[: k_lens[seq]]
        visible = _visible(
            torch.arange(end - start)[None] + k_lens[seq] - (end - start),
            torch.tensor([k_lens[seq]]),
            keys.shape[0],
            (window_left, 0 if causal else window_right),
        )
        result, result_lse = _attend(
            q[None, start:end], keys[None], values[None], visible, softmax_scale, softcap
        )
        out[start:end] = result[0]
        if lse is not None:
            lse[:, start:end] = result_lse[0].T


def paged_attention(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seqused_k: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,  # noqa: ARG001
    sinks: torch.Tensor | None,  # noqa: ARG001
    k_scale: torch.Tensor | None,  # noqa: ARG001
    v_scale: torch.Tensor | None,  # noqa: ARG001
    num_splits: int,  # noqa: ARG001
    kv_split_size: int,  # noqa: ARG001
    workspace: torch.Tensor | None,  # noqa: ARG001
) -> None:
    num_seqs = seqused_k.shape[0]
    if num_seqs == 0 or q.shape[0] == 0:
        return
    k_lens = seqused_k.long()
    # All sequences at once, padded to the longest: at most 16 queries each, and the keys must be
    # gathered anyway.
    pages = block_table[:, : -(-int(k_lens.max()) // k_cache.shape[1])]
    keys = k_cache[pages].flatten(1, 2)
    values = v_cache[pages].flatten(1, 2)
    if cu_seqlens_q is None:
        tokens = torch.arange(num_seqs)[:, None]
        q_lens = torch.ones(num_seqs, dtype=torch.long)
    else:
        tokens = cu_seqlens_q[:-1, None].long() + torch.arange(max_seqlen_q)
        q_lens = cu_seqlens_q.diff().long()
    query = torch.arange(tokens.shape[1])
    real = query < q_lens[:, None]
    visible = _visible(
        query + (k_lens - q_lens)[:, None],
        k_lens,
        keys.shape[1],
        (window_left, 0 if causal else window_right),
    )
    queries = q[tokens.clamp(max=q.shape[0] - 1)]
    result, result_lse = _attend(queries, keys, values, visible, softmax_scale, softcap)
    out[tokens[real]] = result[real].to(out.dtype)
    if lse is not None:
        lse[:, tokens[real]] = result_lse[real].T.to(lse.dtype)


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
    k_scale: torch.Tensor | None,  # noqa: ARG001
    v_scale: torch.Tensor | None,  # noqa: ARG001
) -> None:
    num_pages, page_size = k_cache.shape[:2]
    num_slots = num_pages * page_size
    check_indices("slot_mapping", slot_mapping, torch.iinfo(slot_mapping.dtype).min, num_slots)
    token = ((slot_mapping >= 0) & (slot_mapping < num_slots)).nonzero().squeeze(1)
    slot = slot_mapping[token]
    page, offset = slot // page_size, slot % page_size
    k_cache[page, offset] = key[token]
    v_cache[page, offset] = value[token]


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_dim: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> None:
    max_position, rotary_dim = cos_sin_cache.shape
    check_indices("positions", positions, 0, max_position)
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
        x, y = _accumulable(first), _accumulable(second)
        rotated_x = torch.where(in_table, x * cos - y * sin, x)
        rotated_y = torch.where(in_table, y * cos + x * sin, y)
        first.copy_(rotated_x)
        second.copy_(rotated_y)


def _visible(
    position: torch.Tensor,  # [batch, queries], where each query stands among the keys
    k_lens: torch.Tensor,  # [batch]
    num_keys: int,
    window: tuple[int, int],
) -> torch.Tensor:
    """bool[batch, queries, keys]"""
    key = torch.arange(num_keys)
    visible = (key < k_lens[:, None, None]).expand(*position.shape, num_keys)
    left, right = window
    if left >= 0:
        visible = visible & (key >= position[..., None] - left)
    if right >= 0:
        visible = visible & (key <= position[..., None] + right)
    return visible


def _attend(
    q: torch.Tensor,  # [batch, queries, heads, head_dim]
    k: torch.Tensor,  # [batch, keys, kv_heads, head_dim]
    v: torch.Tensor,
    visible: torch.Tensor,  # bool[batch, queries, keys]
    scale: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [batch, queries, heads, head_dim], lse [batch, queries, heads]), in the accumulation
    dtype."""
    batch, queries, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    # [batch, kv_heads, queries * group, head_dim]: one matrix product per KV head serves its whole
    # group.
    q = q.reshape(batch, queries, kv_heads, -1, head_dim).transpose(1, 2).flatten(2, 3).to(dtype)
    k = k.transpose(1, 2).to(dtype)
    v = torch.where(visible.any(1)[..., None, None], v, 0.0).transpose(1, 2).to(dtype)
    scores = q @ k.transpose(2, 3) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.unflatten(2, (queries, -1))
    scores = scores.masked_fill(~visible[:, None, :, None], float("-inf")).flatten(2, 3)
    top = scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.new_full((1,), -torch.inf)
    weights = torch.exp(scores - torch.where(top.isneginf(), 0.0, top))
    total = weights.sum(-1, keepdim=True)
    out = weights @ v / torch.where(total == 0, 1.0, total)
    lse = (top + total.log()).squeeze(-1)
    out = out.unflatten(2, (queries, -1)).transpose(1, 2).reshape(batch, queries, heads, head_dim)
    return out, lse.unflatten(2, (queries, -1)).transpose(1, 2).reshape(batch, queries, heads)


def _split_heads(x: torch.Tensor, head_dim: int) -> torch.Tensor:
    return x.view(x.shape[0], x.shape[1] // head_dim, head_dim)


def _accumulable(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()
