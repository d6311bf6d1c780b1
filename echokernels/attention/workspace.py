"""Scratch memory of the attention ops: partial outputs and their LSEs, one per (split, row), or two
per program that has a share of the keys, and row.

Its size follows from capacity alone. There is no buffer behind the user's back: a shared one would
race between streams.
"""

import torch

from echokernels._checks import check_bytes, check_range
from echokernels._launch import scratch
from echokernels._target import target_of
from echokernels.attention.split import MOST_SEQS, most_piece_rows, most_split_rows


def attention_workspace_size(
    max_seqs: int,
    max_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_splits: int = 0,
    device: torch.device | str | None = None,
) -> int:
    """Bytes of `workspace` that serve every call of up to max_seqs sequences and max_tokens query
    tokens.

    num_splits: as passed to the op; pass 32 where the op gets kv_split_size > 0. device: the GPU it
    will run on (the current one by default).
    """
    for name, value in (("max_seqs", max_seqs), ("max_tokens", max_tokens), ("head_dim", head_dim)):
        check_range(name, value, 0)
    check_range("num_heads", num_heads, 1)
    check_range("num_kv_heads", num_kv_heads, 1)
    check_range("num_splits", num_splits, 0)
    where = (
        torch.device("cuda" if torch.cuda.is_available() else "cpu") if device is None else device
    )
    num_sms = target_of(torch.device(where)).num_sms
    rows = 0
    if num_splits > 0 or max_seqs > MOST_SEQS:
        rows = most_split_rows(num_splits, max_seqs, max_tokens, num_kv_heads, num_sms) * num_heads
    if num_splits == 0:
        rows = max(rows, most_piece_rows(max_tokens, num_heads, num_kv_heads, num_sms))
    return rows * (head_dim + 1) * 4


def partials(
    workspace: torch.Tensor | None, q: torch.Tensor, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial outputs of `rows` rows in all, and their LSEs, in the workspace given or newly
    allocated."""
    need = rows * (q.shape[2] + 1)
    if workspace is None:
        memory = scratch((need,), torch.float32, q.device)
    else:
        check_bytes("workspace", workspace, need * 4, "attention_workspace_size")
        memory = workspace.view(-1).view(torch.uint8)[: need * 4].view(torch.float32)
    return memory[: rows * q.shape[2]], memory[rows * q.shape[2] :]
