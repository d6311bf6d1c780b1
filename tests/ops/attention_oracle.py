"""What attention is, spelled out: one sequence and one head at a time, in float64, with nothing
shared with the package."""

import math
from dataclasses import dataclass

import torch

from tests.tolerances import assert_close


@dataclass(frozen=True)
class Features:
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: str = ""  # "heads": slopes for each head, "sequences": for each sequence and head
    sinks: bool = False


def biases(
    features: Features,
    num_seqs: int,
    heads: int,
    dtype: torch.dtype,
    device: torch.device,
    gen: torch.Generator,
) -> dict[str, torch.Tensor]:
    """The tensors that `features` asks for, by the ops' names."""
    found = {}
    if features.alibi:
        shape = (num_seqs, heads) if features.alibi == "sequences" else (heads,)
        found["alibi_slopes"] = torch.rand(shape, generator=gen).to(device)
    if features.sinks:
        sinks = torch.randn(heads, generator=gen) * 3
        sinks[0] = -math.inf  # as if there were none
        found["sinks"] = sinks.to(dtype).to(device)
    return found


def attend_one(
    q: torch.Tensor,  # f64[q_len, head_dim]
    k: torch.Tensor,  # f64[k_len, head_dim]
    v: torch.Tensor,
    scale: float,
    features: Features,
    slope: float = 0.0,
    sink: float = -math.inf,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [q_len, head_dim], lse [q_len])"""
    q_len, k_len = q.shape[0], k.shape[0]
    out = torch.zeros(q_len, q.shape[1], dtype=torch.float64)
    lse = torch.full((q_len,), sink, dtype=torch.float64)
    left, right = features.window
    if features.causal:
        right = 0
    for i in range(q_len):
        position = i + k_len - q_len
        low = 0 if left < 0 else max(0, position - left)
        high = k_len if right < 0 else min(k_len, position + right + 1)
        if low >= high:
            continue
        s = k[low:high] @ q[i] * scale
        if features.softcap > 0:
            s = features.softcap * torch.tanh(s / features.softcap)
        s = s - slope * (position - torch.arange(low, high)).abs()
        with_sink = torch.cat([s, torch.tensor([sink], dtype=torch.float64)])
        out[i] = torch.softmax(with_sink, 0)[:-1] @ v[low:high]
        lse[i] = torch.logsumexp(with_sink, 0)
    return out, lse


def attend_ragged(
    q: torch.Tensor,  # [tokens, heads, head_dim]
    keys: list[torch.Tensor],  # each [k_len, kv_heads, head_dim]
    values: list[torch.Tensor],
    q_lens: list[int],
    scale: float,
    features: Features,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out f64[tokens, heads, head_dim], lse f64[heads, tokens])"""
    q = q.double().cpu()
    out = torch.zeros_like(q)
    lse = torch.full((q.shape[1], q.shape[0]), -math.inf, dtype=torch.float64)
    start = 0
    for seq, (k, v, q_len) in enumerate(zip(keys, values, q_lens, strict=True)):
        k, v = k.double().cpu(), v.double().cpu()
        for head in range(q.shape[1]):
            kv_head = head * k.shape[1] // q.shape[1]
            rows = slice(start, start + q_len)
            slope, sink = 0.0, -math.inf
            if alibi_slopes is not None:
                slope = alibi_slopes[(seq, head)[-alibi_slopes.dim() :]].item()
            if sinks is not None:
                sink = sinks[head].item()
            out[rows, head], lse[head, rows] = attend_one(
                q[rows, head],
                k[:, kv_head],
                v[:, kv_head],
                scale,
                features,
                slope,
                sink,
            )
        start += q_len
    return out, lse


def values_scale(values: list[torch.Tensor]) -> float:
    """What errors of an output are measured against: it is an average of values, whose weights may
    cancel."""
    real = [v.double().abs().max().item() for v in values if v.numel()]
    return max(real, default=1.0)


def check(
    out: torch.Tensor,
    lse: torch.Tensor,
    want: torch.Tensor,
    want_lse: torch.Tensor,
    values: list[torch.Tensor],
) -> None:
    # Two roundings: of the weights, for the second product, and of the result.
    assert_close(out, want, roundings=2, scale=values_scale(values))
    assert_close(lse, want_lse, roundings=4, scale=4.0)
