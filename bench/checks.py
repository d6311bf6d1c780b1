"""How results are judged.

A check gets the inputs, before any run, and returns the function from a run's outputs to its error.
"""

from collections.abc import Callable
from typing import Any

import torch

from bench.case import Check, Inputs, Outputs, clone
from bench.formulas import kept_probs

# Standard deviations: wide enough for the skewed distribution of a single draw too.
MOST_DEVIATIONS = 6.0


def as_tuple(outputs: Outputs) -> tuple[torch.Tensor, ...]:
    return (outputs,) if isinstance(outputs, torch.Tensor) else outputs


def against(reference: Callable[..., Outputs]) -> Check:
    """The largest relative error of a row, against `reference` on the inputs in float64.

    By rows of the last dimension: one that is wrong shows, however many are right.
    """

    def check(inputs: Inputs) -> Callable[[Outputs], float]:
        expected = as_tuple(reference(*map(to_double, clone(inputs))))

        def error(outputs: Outputs) -> float:
            return max(row_error(*pair) for pair in zip(as_tuple(outputs), expected, strict=True))

        return error

    return check


def row_error(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    """max over rows of ‖actual - wanted‖ / max(‖wanted‖, RMS of ‖wanted‖); infinite if NaN."""
    if actual.numel() != wanted.numel():
        return float("inf")
    wanted = wanted if wanted.is_floating_point() else wanted.double()
    difference = torch.linalg.vector_norm(actual.reshape(wanted.shape) - wanted, dim=-1)
    norm = torch.linalg.vector_norm(wanted, dim=-1)
    floor = norm.square().mean().sqrt().clamp_min(1e-30)
    return float((difference / norm.clamp_min(floor)).nan_to_num(nan=torch.inf).max())


def total_error(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    """‖actual - wanted‖ / ‖wanted‖ of all elements together."""
    return float((actual.reshape(wanted.shape) - wanted).norm() / wanted.norm())


def to_double(x: Any) -> Any:
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def most_likely(inputs: Inputs) -> Callable[[Outputs], float]:
    """The share of rows whose token is not one of the most likely. inputs: (logits, ...)."""
    logits = inputs[0].clone()

    def error(outputs: Outputs) -> float:
        hits = _is(as_tuple(outputs)[0], torch.arange(logits.shape[-1], device=logits.device))
        return 1.0 - float(
            (hits & (logits == logits.amax(-1, keepdim=True))).any(-1).float().mean()
        )

    return error


def drawn_by_probability(inputs: Inputs) -> Callable[[Outputs], float]:
    """How far Σ log p(token) is from its expectation -Σ entropy, in standard deviations.

    Infinite if a token has no probability, for example because top-k or top-p exclude it.
    inputs: (logits [rows, vocab], temperature, top_k, top_p, ...).
    """
    logits, temperature, top_k, top_p = (x.double() for x in inputs[:4])
    logits, ids = logits.sort(-1, descending=True)
    probs = kept_probs(logits, temperature, top_k, top_p)
    entropy = torch.special.entr(probs).sum(-1)
    surprise = torch.where(probs > 0, probs.log() + entropy[:, None], 0.0)
    variance = (probs * surprise.square()).sum(-1)

    def error(outputs: Outputs) -> float:
        drawn = (probs * _is(as_tuple(outputs)[0], ids)).sum(-1)
        return float(((drawn.log() + entropy).sum() / variance.sum().sqrt()).abs())

    return error


def _is(tokens: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Where `ids` [vocab] or [rows, vocab] is the token of the row: bool[rows, vocab]."""
    return ids == tokens[:, None]
