"""Cases of prefill: prompts of one length, ragged, windowed, after a prefix; packed or in pages."""

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

import echokernels
from bench import formulas, inputs
from bench.case import Case, Inputs, Outputs, Peer, returning
from bench.checks import against
from bench.inputs import Sequence, randn
from bench.peers import flex_peer, sdpa_peers
from bench.suites import Prefill, Suite
from echokernels._path import forced_path

BF16 = 2  # bytes of an element
ATTENTION = 2e-2  # weights are rounded to bf16 before the second product


def prefills(s: Suite) -> list[Case]:
    return [case_of(s, prompts) for prompts in s.prefill]


def case_of(s: Suite, prompts: Prefill) -> Case:
    tokens, keys = sum(prompts.q_lens), sum(prompts.k_lens)
    return Case(
        "flash_attn_varlen",
        f"{prompts.name}_h{s.heads}/{s.kv_heads}_d{prompts.head_dim}",
        make=lambda d: _make(d, s.heads, s.kv_heads, prompts),
        run=run,
        check=against(exact),
        tolerance=ATTENTION,
        num_bytes=2 * (tokens * s.heads + keys * s.kv_heads) * prompts.head_dim * BF16,
        num_flops=4 * _visible(prompts) * s.heads * prompts.head_dim,
        ceiling="matmul",
        peers=_peers(s, prompts),
        tags=_tags(prompts),
    )


def _tags(prompts: Prefill) -> frozenset[str]:
    """What peers may depend on."""
    if prompts.paged:
        return frozenset({"pages"})
    return frozenset({"packed", "dense"} if _is_square(prompts) else {"packed"})


def _is_square(prompts: Prefill) -> bool:
    """Of one length, with as many queries as keys: what dense kernels take."""
    return prompts.q_lens == prompts.k_lens and len(set(prompts.q_lens)) == 1


def _visible(prompts: Prefill) -> int:
    """(query, key) pairs that count."""
    pairs = 0
    for q_len, k_len in zip(prompts.q_lens, prompts.k_lens, strict=True):
        if not prompts.causal:
            pairs += q_len * k_len
            continue
        most = k_len if prompts.window_left < 0 else prompts.window_left + 1
        first = k_len - q_len + 1  # keys that the first query sees
        pairs += sum(min(most, first + i) for i in range(q_len))
    return pairs


def _make(device: torch.device, heads: int, kv_heads: int, prompts: Prefill) -> Inputs:
    """The arguments of `run`."""
    q = randn(device, sum(prompts.q_lens), heads, prompts.head_dim)
    lengths = max(prompts.q_lens), max(prompts.k_lens), prompts.causal, prompts.window_left
    cu_seqlens_q, cu_seqlens_k = (
        torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device=device)
        for lens in (prompts.q_lens, prompts.k_lens)
    )
    if prompts.paged:
        _, k, v, block_table, seqused_k = inputs.contexts(
            device, list(prompts.k_lens), 1, kv_heads, prompts.head_dim
        )
        return q, k, v, cu_seqlens_q, None, seqused_k, block_table, *lengths
    k, v = (randn(device, sum(prompts.k_lens), kv_heads, prompts.head_dim) for _ in range(2))
    return q, k, v, cu_seqlens_q, cu_seqlens_k, None, None, *lengths


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    seqused_k: Tensor | None,
    block_table: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    window_left: int,
) -> Outputs:
    return echokernels.flash_attn_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        seqused_k=seqused_k, block_table=block_table, causal=causal, window=(window_left, -1),
    )  # fmt: skip


def sequences(*arguments: Any) -> Iterator[Sequence]:
    """The (q, k, v) of every sequence, from what `_make` made."""
    q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table = arguments[:7]
    queries = q.split(cu_seqlens_q.diff().tolist())
    if block_table is None:
        lens = cu_seqlens_k.diff().tolist()
        yield from zip(queries, k.split(lens), v.split(lens), strict=True)
        return
    for query, pages, length in zip(queries, block_table, seqused_k.tolist(), strict=True):
        yield query, *(cache[pages.long()].flatten(0, 1)[:length] for cache in (k, v))


def exact(*arguments: Any) -> Tensor:
    """The formula, in the dtype of the arguments of `run`."""
    causal, window_left = arguments[-2:]
    return torch.cat(
        [formulas.attention(*qkv, causal, window_left) for qkv in sequences(*arguments)]
    )


def _peers(s: Suite, prompts: Prefill) -> dict[str, Peer]:
    peers = {"echo-portable": Peer(returning(run).prepare, lambda: forced_path("portable"))}
    if not _is_square(prompts) or prompts.window_left >= 0:
        return peers
    suffix = "-dense-kv" if prompts.paged else ""
    peers |= sdpa_peers(s.sdpa, sequences, causal=prompts.causal, suffix=suffix)
    if s.compile_modes and not prompts.paged:
        peers["flex"] = flex_peer(sequences, causal=prompts.causal)
    return peers
