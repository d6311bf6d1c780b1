"""Plain PyTorch form of the sampling op: its definition and the CPU implementation.

Arithmetic is in float32, or float64 when the logits are float64. Rows pay only for what they ask
for: greedy ones for an argmax, filtered ones for a partial sort, ids that are allowed for noise.
"""

import torch

from echokernels._reference import accumulable

GREEDY_BELOW = 2.0**-126
"""Temperatures below this, the smallest normal fp32 number, are greedy."""

NEGLIGIBLE = 2.0**-38
"""An id this much less likely than the most likely one loses to it: noise spans less than 26."""

_WORD = 0xFFFFFFFF
# Groups of ids whose words stay in the CPU's cache.
_CHUNK = 32_768


def sample(
    tokens: torch.Tensor,
    logprobs: torch.Tensor | None,
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    if logits.shape[0] == 0:
        return
    logits = clean(logits)
    choice = logits.argmax(-1)
    peak = logits.gather(1, choice[:, None])
    drawn = (temperature >= GREEDY_BELOW) & (peak[:, 0] > -torch.inf)
    if drawn.any():
        args = (logits, peak, temperature, top_k, top_p, min_p, seeds, positions)
        choice[drawn] = _draw(*(arg if drawn.all() else arg[drawn] for arg in args))
    tokens.copy_(choice)
    if logprobs is not None:
        relative = torch.where(logits < peak, logits - peak, 0.0)
        chosen = relative.gather(1, choice[:, None])[:, 0]
        logprobs.copy_(chosen - relative.exp_().sum(-1).log_())


def gumbel(
    seeds: torch.Tensor, positions: torch.Tensor, groups: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Noise of ids 4 * groups .. 4 * groups + 3: [..., 4], between -2.9 and 22.9.

    seeds, positions, groups: int64 of one shape.
    """
    words = torch.stack(philox(seeds, groups, positions & _WORD, positions >> 32 & _WORD), dim=-1)
    u = words.float().mul_(2.0**-32).clamp_(2.0**-33, 1 - 2.0**-24)
    return u.to(dtype).neg_().log1p_().neg_().log_().neg_()


def philox(
    key: torch.Tensor, c0: torch.Tensor, c1: torch.Tensor, c2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Philox4x32-10 of keys and counters (c0, c1, c2, 0): int64 tensors of one shape.

    The counters, and the words that come back, are below 2^32.
    """
    k0, k1 = key & _WORD, key >> 32 & _WORD
    c3 = torch.zeros_like(c0)
    for _ in range(10):
        # Products wrap modulo 2^64, which leaves both halves right. Bits above a word are
        # masked only where they would matter.
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0 = (b >> 32).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(_WORD)
        c2 = (a >> 32).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(_WORD)
        c1, c3 = b, a
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1 & _WORD, c2, c3 & _WORD


def clean(logits: torch.Tensor) -> torch.Tensor:
    """NaN as -inf, +inf as the largest finite number of fp32."""
    logits = accumulable(logits)
    return logits.nan_to_num(-torch.inf, torch.finfo(torch.float32).max, -torch.inf)


def _draw(
    logits: torch.Tensor,
    peak: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    rows, vocab = logits.shape
    positions = positions.long()
    temperature = temperature.to(logits.dtype).clamp_max(2.0**126)[:, None]
    scores = (logits - peak).div_(temperature)
    cutoff = min_p.to(logits.dtype).clamp(NEGLIGIBLE, 1.0).log_()[:, None]
    threshold = _top_p_threshold(logits, scores, _top_k_threshold(logits, top_k), top_p)
    scores.masked_fill_((scores < cutoff) | (logits < threshold), -torch.inf)
    # Philox gives the noise of four ids at once; most groups of four have no id that is allowed.
    scores = torch.nn.functional.pad(scores, (0, -vocab % 4), value=-torch.inf).view(rows, -1, 4)
    live = (scores > -torch.inf).any(-1).nonzero()
    for row, group in (chunk.unbind(1) for chunk in live.split(_CHUNK)):
        scores[row, group] += gumbel(seeds[row], positions[row], group, scores.dtype)
    return scores.view(rows, -1).argmax(-1)


def _top_k_threshold(logits: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """The smallest logit that each row keeps: [rows, 1]."""
    threshold = logits.new_full((logits.shape[0], 1), -torch.inf)
    limited = (top_k > 0) & (top_k < logits.shape[1])
    if limited.any():
        k = top_k[limited].long()[:, None]
        threshold[limited] = logits[limited].topk(int(k.max())).values.gather(1, k - 1)
    return threshold


def _top_p_threshold(
    logits: torch.Tensor, scores: torch.Tensor, threshold: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """Like `threshold`, which it raises. Row by row, as each sorts a different number of ids."""
    for row in (top_p < 1).nonzero()[:, 0].tolist():
        weights = scores[row].exp().masked_fill_(logits[row] < threshold[row], 0.0)
        threshold[row] = _nucleus_threshold(logits[row], weights, top_p[row].clamp_min(0.0))
    return threshold


def _nucleus_threshold(
    logits: torch.Tensor, weights: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    target = top_p * weights.sum()
    # Sort only so many ids as hold the nucleus.
    least = 1.0
    while weights.where(weights >= least, 0.0).sum() < target:
        least /= 8
    heavy = (weights >= least).nonzero()[:, 0]
    logits, order = logits[heavy].sort(descending=True)
    mass = weights[heavy[order]].cumsum_(0)
    last = torch.searchsorted(mass, target[None])
    return logits[last.clamp_max_(logits.numel() - 1)]
