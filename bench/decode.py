"""Cases of decode: contexts of one length, ragged; other heads and pages; few queries; a window."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import echokernels
from bench import formulas, inputs
from bench.case import Case, Inputs, Outputs, Peer, returning
from bench.checks import against
from bench.peers import sdpa_peers
from bench.prefill import ATTENTION, BF16
from bench.suites import Decode, Suite
from echokernels._path import forced_path


def decodes(s: Suite) -> list[Case]:
    return [decode_case(contexts, _peers(s, contexts)) for contexts in s.decode]


def decode_case(contexts: Decode, peers: Mapping[str, Peer]) -> Case:
    lens, queries = contexts.lens, contexts.queries
    # What is read: all keys that a query sees.
    seen = [n if contexts.window_left < 0 else min(n, contexts.window_left + queries) for n in lens]
    row = contexts.head_dim * BF16
    return Case(
        "paged_attention",
        contexts.full_name,
        make=lambda d: _make(d, contexts),
        run=_run,
        check=against(_formula),
        tolerance=ATTENTION,
        num_bytes=2 * (sum(seen) * contexts.kv_heads + len(lens) * queries * contexts.heads) * row,
        num_flops=4 * sum(seen) * queries * contexts.heads * contexts.head_dim,
        ceiling="read",
        peers=peers,
        tags=_tags(contexts),
    )


def _tags(contexts: Decode) -> frozenset[str]:
    """What peers may depend on."""
    tags = {"one-query" if contexts.queries == 1 else "queries"}
    tags |= {"no-window"} if contexts.window_left < 0 else set()
    return frozenset(tags | {f"page-{contexts.page_size}", f"head-dim-{contexts.head_dim}"})


def _make(device: torch.device, contexts: Decode) -> Inputs:
    """The arguments of `_run`."""
    q, k_cache, v_cache, block_table, seqused_k = inputs.contexts(
        device, list(contexts.lens), contexts.heads, contexts.kv_heads, contexts.head_dim,
        contexts.queries, contexts.page_size,
    )  # fmt: skip
    cu_seqlens_q = torch.arange(
        0, q.shape[0] + 1, contexts.queries, dtype=torch.int32, device=device
    )
    return (
        q, k_cache, v_cache, block_table, seqused_k, cu_seqlens_q, contexts.queries,
        max(contexts.lens), contexts.window_left,
    )  # fmt: skip


def _run(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seqused_k: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,  # noqa: ARG001
    window_left: int,
) -> Outputs:
    return echokernels.paged_attention(
        q, k_cache, v_cache, block_table, seqused_k,
        cu_seqlens_q=None if max_seqlen_q == 1 else cu_seqlens_q, max_seqlen_q=max_seqlen_q,
        window=(window_left, -1),
    )  # fmt: skip


def _formula(*arguments: Any) -> Tensor:
    window_left = arguments[-1]
    return torch.cat(
        [
            formulas.attention(*qkv, True, window_left)
            for qkv in inputs.context_sequences(*arguments)
        ]
    )


def _peers(s: Suite, contexts: Decode) -> dict[str, Peer]:
    peers = {"echo-portable": Peer(returning(_run).prepare, lambda: forced_path("portable"))}
    if len(set(contexts.lens)) > 1 or contexts.queries > 1 or contexts.window_left >= 0:
        return peers  # a dense KV cache would need padding or a mask
    return peers | sdpa_peers(s.sdpa, inputs.context_sequences, causal=False, suffix="-dense-kv")
