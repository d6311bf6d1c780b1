"""What a router must choose, token by token in plain Python, in float64."""

import math

MOST = 3.4028234663852886e38


def clean(x: float) -> float:
    return -math.inf if math.isnan(x) else min(x, MOST)


def softmax(logits: list[float]) -> list[float]:
    peak = max(logits)
    powers = [math.exp(x - peak) if x < peak else 1.0 for x in logits]
    return [p / math.fsum(powers) for p in powers]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def best(scores: dict[int, float], count: int) -> list[int]:
    return sorted(scores, key=lambda i: (-scores[i], i))[:count]


def weigh(scores: list[float], renormalize: bool, factor: float) -> list[float]:
    total = math.fsum(scores)
    if renormalize:
        scores = [s / total if total > 0 else 1 / len(scores) for s in scores]
    return [s * factor for s in scores]


def topk_softmax(logits: list[float], k: int, renormalize: bool) -> tuple[list[int], list[float]]:
    logits = [clean(x) for x in logits]
    ids = best(dict(enumerate(logits)), k)
    scores = softmax(logits)
    return ids, weigh([scores[i] for i in ids], renormalize, 1.0)


def grouped_scores(
    logits: list[float], bias: list[float] | None, sigmoids: bool
) -> tuple[list[float], list[float]]:
    """(scores, those that the choice goes by)"""
    logits = [clean(x) for x in logits]
    scores = [sigmoid(x) for x in logits] if sigmoids else softmax(logits)
    return scores, scores if bias is None else [s + b for s, b in zip(scores, bias, strict=True)]


def group_scores(choice: list[float], num_groups: int, summed: int) -> list[float]:
    size = len(choice) // num_groups
    groups = [sorted(choice[g * size : (g + 1) * size], reverse=True) for g in range(num_groups)]
    return [math.fsum(group[:summed]) for group in groups]
