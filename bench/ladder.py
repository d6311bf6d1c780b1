"""Why decode splits its keys as it does: `python -m bench.ladder`.

One sequence of 1k to 1M tokens by four designs, each a step up: all keys gathered into one tensor
and attended to there (what an engine without paged kernels does); blocks read where they are, each
KV head by one program (PagedAttention V1); splits of 64 tokens (flash decoding at its finest); and
what `paged_attention` chooses. And from INT8 pages: dequantised into pages of bf16 first, or where
they are multiplied. Time by graph replay, and the bytes of scratch memory that each needs. Prints
tables and writes a CSV file.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import echokernels
from bench import formulas, inputs, session
from bench.case import Case, Outputs, Peer, returning
from bench.checks import against
from bench.int8_kv import quantised
from bench.measure import check_and_time
from bench.prefill import ATTENTION, BF16
from bench.results import OURS, Row
from bench.timing import Call, graph_us, make_round
from echokernels._launch import record
from echokernels._replay import bypass

UNIT = "bytes of scratch"
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SPLIT = 64
OF_CODES = 5e-2  # what the codes of random keys and values cost


def main(argv: Sequence[str] | None = None) -> int:
    return session.single_table(
        argv, "ladder", str(__doc__), f"us ({UNIT})", ladder_cases, _measure_on
    )


def _measure_on(device: torch.device, _quick: bool) -> Callable[[Case], list[Row]]:
    def measure(case: Case) -> list[Row]:
        rows = check_and_time(
            case,
            device,
            lambda calls: make_round(calls, device),
            lambda works: [{"graph_us": us} for us in graph_us(works, device)],
            lambda given: case.rotation(given, device),
        )
        return [replace(row, rate=scratch_bytes(row.impl, case, device), unit=UNIT) for row in rows]

    return measure


def ladder_cases(quick: bool) -> list[Case]:
    """A case for each context, named by its length."""
    return [_case(1 << bits) for bits in (range(4, 6) if quick else range(10, 21))]


def _case(length: int) -> Case:
    row = HEAD_DIM * BF16
    return Case(
        "ladder",
        str(length),
        make=lambda device: inputs.contexts(device, [length], HEADS, KV_HEADS, HEAD_DIM),
        run=echokernels.paged_attention,
        check=against(_formula),
        tolerance=ATTENTION,
        num_bytes=2 * (length * KV_HEADS + HEADS) * row,
        ceiling="read",
        peers={
            "splits-of-64": returning(_with_splits(-(-length // SPLIT))),
            "not-split": returning(_with_splits(1)),
            "gathered": returning(_gathered),
            "int8": Peer(_from_codes, tolerance=OF_CODES),
            "int8-dequantised-first": Peer(_dequantised_first, tolerance=OF_CODES),
        },
    )


def _formula(*arguments: Any) -> Tensor:
    return torch.cat(
        [formulas.attention(*qkv, True, -1) for qkv in inputs.context_sequences(*arguments)]
    )


def _with_splits(num_splits: int) -> Callable[..., Outputs]:
    return partial(echokernels.paged_attention, num_splits=num_splits)


def _gathered(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seqused_k: Tensor
) -> Tensor:
    # Pages are full and the sequence is one: nothing is masked.
    keys, values = (
        cache[block_table[0]].flatten(0, 1).transpose(0, 1)[None] for cache in (k_cache, v_cache)
    )
    assert seqused_k.shape == (1,)
    out = functional.scaled_dot_product_attention(q[:, :, None], keys, values, enable_gqa=True)
    return out[:, :, 0]


def _from_codes(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seqused_k: Tensor
) -> Call:
    (k, k_scale), (v, v_scale) = quantised(k_cache), quantised(v_cache)
    return lambda: echokernels.paged_attention(
        q, k, v, block_table, seqused_k, k_scale=k_scale, v_scale=v_scale
    )


def _dequantised_first(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seqused_k: Tensor
) -> Call:
    codes = quantised(k_cache), quantised(v_cache)

    def call() -> Outputs:
        k, v = (echokernels.dequantize_int8(*each, q.dtype) for each in codes)
        return echokernels.paged_attention(q, k, v, block_table, seqused_k)

    return call


def scratch_bytes(impl: str, case: Case, device: torch.device) -> float:
    """Of device memory, besides inputs and outputs."""
    if impl in ("gathered", "int8-dequantised-first"):
        return float(2 * int(case.name) * KV_HEADS * HEAD_DIM * BF16)
    run = case.run if impl == OURS else case.peers[impl].prepare
    given = case.make(device)
    with bypass(), record() as recording:
        result = run(*given)
        if callable(result):
            result()
    return float(sum(memory.nbytes for memory in recording.scratch))


if __name__ == "__main__":
    raise SystemExit(main())
