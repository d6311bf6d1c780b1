"""What `sample` may answer for one row, in float64 with NumPy and a Philox of its own."""

from dataclasses import dataclass

import numpy as np
import torch

# fp32 sums and exponentials move the edge of a set, or a score, by this much at most.
MARGIN = 2e-5


@dataclass(frozen=True)
class Row:
    """Arguments of one row. `logits` is float64, but holds values of the dtype under test."""

    logits: np.ndarray
    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 0


def per_row(device, rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seeds=None, positions=0):
    """The arguments after `logits`. Each is one value for all rows, or a list."""

    def tensor(value, dtype):
        values = value if isinstance(value, list) else [value] * rows
        return torch.tensor(values, dtype=dtype, device=device)

    return (
        tensor(temperature, torch.float32),
        tensor(top_k, torch.int32),
        tensor(top_p, torch.float32),
        tensor(min_p, torch.float32),
        tensor(list(range(rows)) if seeds is None else seeds, torch.int64),
        tensor(positions, torch.int64),
    )


def rows_of(logits, args):
    """The oracle's rows: what the kernel sees, after rounding to its dtypes."""
    columns = zip(logits.double().cpu().numpy(), *(arg.tolist() for arg in args), strict=True)
    return [Row(*column) for column in columns]


def philox(key: int, counter: tuple[int, int, int, int]) -> list[int]:
    """Philox4x32-10 in Python integers, as its paper states it."""
    c, k = list(counter), [key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF]
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def noise(row: Row) -> np.ndarray:
    position = (row.position & 0xFFFFFFFF, row.position >> 32 & 0xFFFFFFFF)
    groups = range(-(-row.logits.size // 4))
    words = [word for group in groups for word in philox(row.seed, (group, *position, 0))]
    u = np.array(words[: row.logits.size], np.float32).astype(np.float64) * 2.0**-32
    return -np.log(-np.log1p(-u.clip(2.0**-33, 1 - 2.0**-24)))


def scores(row: Row) -> np.ndarray:
    with np.errstate(invalid="ignore", over="ignore"):
        relative = (row.logits - row.logits.max()) / row.temperature
    return np.where(np.isneginf(row.logits), -np.inf, relative)


def allowed(row: Row, margin: float = 0.0) -> np.ndarray:
    """The ids that pass the filters, each loosened by `margin` (tightened if it is negative)."""
    logits, score = row.logits, scores(row)
    keep = ~np.isneginf(logits)
    if 0 < row.top_k < logits.size:
        keep &= logits >= np.sort(logits)[-row.top_k]
    share = row.top_p + margin
    if row.top_p < 1 and share < 1:
        order = np.argsort(-np.where(keep, logits, -np.inf), kind="stable")
        mass = np.cumsum(np.exp(score[order]) * keep[order])
        last = np.searchsorted(mass, max(share, 0.0) * mass[-1])
        keep &= logits >= logits[order[last]]
    if row.min_p > 0:
        keep &= score >= np.log(row.min_p) - margin
    return keep | (logits == logits.max())


def accepts(row: Row, token: int) -> bool:
    """`token` is right but for rounding: it may be allowed, and nothing surely allowed beats it."""
    perturbed = scores(row) + noise(row)
    best = perturbed[allowed(row, -MARGIN)].max()
    return bool(allowed(row, MARGIN)[token] and perturbed[token] >= best - MARGIN)


def logprob(row: Row, token: int) -> float:
    relative = row.logits - row.logits.max()
    return float(relative[token] - np.log(np.exp(relative).sum()))
