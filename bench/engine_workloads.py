"""What engines are asked for: prompts of random token ids, and how many tokens each is to make.

The draws are those of nano-vllm's benchmark (seed 0, ids up to 10,000, prompts and outputs of 100
to 1,024 tokens), so figures can be compared; `sizes` makes all of it smaller for a CPU.
"""

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

_LENGTHS = Path(__file__).parent / "data" / "prompt_lengths.json"
_MOST_ID = 10_000


@dataclass(frozen=True)
class Sizes:
    requests: int = 256
    least: int = 100  # tokens of a prompt or an output
    most: int = 1024
    prefix: int = 2048  # shared by an eighth of all requests
    own: int = 128
    own_outputs: int = 64
    longest: int = 3072  # prompt of the realistic workload: with its output 4,096
    arrival_seconds: float = 20.0
    most_id: int = _MOST_ID


FULL = Sizes()
QUICK = Sizes(8, 4, 24, 32, 4, 3, 40, 0.2, 30)


@dataclass(frozen=True)
class Workload:
    name: str
    prompts: list[list[int]]
    outputs: list[int]  # tokens that each makes
    arrivals: list[float] | None = None  # seconds after the start; None: all at once

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        return sum(self.outputs)


def _ids(draw: random.Random, count: int, s: Sizes) -> list[int]:
    return [draw.randint(0, s.most_id) for _ in range(count)]


def _offline(name: str, share: int, shift: int, s: Sizes) -> Workload:
    """The first 1 / share of the requests. shift: another one, of the same lengths."""
    draw = random.Random(0)
    prompts = [_ids(draw, draw.randint(s.least, s.most), s) for _ in range(s.requests)]
    outputs = [draw.randint(s.least, s.most) for _ in range(s.requests)]
    count = s.requests // share
    shifted = [[(token + shift) % (s.most_id + 1) for token in prompt] for prompt in prompts]
    return Workload(name, shifted[:count], outputs[:count])


def _prefixes(name: str, shares: bool, s: Sizes) -> Workload:
    draw = random.Random(1 if shares else 2)
    prefixes = [_ids(draw, s.prefix, s) for _ in range(8 if shares else s.requests)]
    prompts = [prefixes[i % len(prefixes)] + _ids(draw, s.own, s) for i in range(s.requests)]
    return Workload(name, prompts, [s.own_outputs] * s.requests)


def _lengths(s: Sizes) -> list[int]:
    """Of the prompts of writing requests, as people sent them, in the order of the file."""
    return [min(length, s.longest) for length in json.loads(_LENGTHS.read_text())[: s.requests]]


def _realistic(name: str, s: Sizes) -> Workload:
    draw = random.Random(3)
    prompts = [_ids(draw, length, s) for length in _lengths(s)]
    return Workload(name, prompts, [draw.randint(s.least, s.most) for _ in prompts])


def _arrivals(name: str, s: Sizes) -> Workload:
    """The realistic one, at random moments: a prompt often comes while others decode."""
    workload = _realistic(name, s)
    draw = random.Random(4)
    arrivals = sorted(draw.uniform(0, s.arrival_seconds) for _ in workload.prompts)
    return Workload(name, workload.prompts, workload.outputs, arrivals)


WORKLOADS: Mapping[str, Callable[[Sizes], Workload]] = {
    "offline-256": lambda s: _offline("offline-256", 1, 0, s),
    "offline-64": lambda s: _offline("offline-64", 4, 1, s),
    "shared-prefix": lambda s: _prefixes("shared-prefix", True, s),
    "unshared": lambda s: _prefixes("unshared", False, s),
    "realistic": lambda s: _realistic("realistic", s),
    "arrivals": lambda s: _arrivals("arrivals", s),
}
