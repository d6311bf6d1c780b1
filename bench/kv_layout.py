"""Which layout of cache pages reads fastest: `python -m bench.kv_layout`.

Decode over token-major pages [page_size, kv_heads, head_dim], in which the heads of a token are
neighbours, and over head-major ones [kv_heads, page_size, head_dim], in which the tokens of a head
are. The same kernels read both by their strides. Rows of 256 bytes, and of 128: as they would be in
INT8. Prints a table and writes a CSV file.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bench import ceilings, session
from bench.case import Case, Peer
from bench.decode import decode_case
from bench.measure import measure_case
from bench.results import Row
from bench.suites import Decode
from bench.timing import Call

_CONTEXTS = {
    "1x8k": [8192],
    "8x8k": [8192] * 8,
    "64x8k": [8192] * 64,
    "256x1k": [1024] * 256,
}


def main(argv: Sequence[str] | None = None) -> int:
    legend = "us by graph replay, inputs not in the L2 (TB/s, share of a read)"
    return session.single_table(argv, "kv_layout", str(__doc__), legend, layout_cases, _measure_on)


def _measure_on(device: torch.device, quick: bool) -> Callable[[Case], list[Row]]:
    highest = ceilings.measure(device, quick)
    return lambda case: measure_case(case, device, highest)


def layout_cases(quick: bool) -> list[Case]:
    contexts = {"2x40": [40] * 2} if quick else _CONTEXTS
    decodes = [
        Decode(name, lens, head_dim=head_dim, page_size=page_size)
        for head_dim in (128, 64)
        for page_size in (16, 64)
        for name, lens in contexts.items()
    ]
    return [_with_head_major(decode_case(decode, {})) for decode in decodes]


def _with_head_major(case: Case) -> Case:
    def prepare(*inputs: Any) -> Call:
        q, k_cache, v_cache, *rest = inputs
        caches = [head_major(cache) for cache in (k_cache, v_cache)]
        return lambda: case.run(q, *caches, *rest)

    return replace(case, op="kv_layout", peers={"head-major": Peer(prepare)})


def head_major(cache: Tensor) -> Tensor:
    """The same pages, by index, with the tokens of a head side by side in memory."""
    return cache.transpose(1, 2).contiguous().transpose(1, 2)


if __name__ == "__main__":
    raise SystemExit(main())
