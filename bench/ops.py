"""The registry: every op at the shapes that matter, the fewest bytes it must move, its peers.

`cases(FULL)` is what is measured on a GPU, `cases(QUICK)` has tiny shapes and runs anywhere.
"""

from collections.abc import Mapping
from functools import partial
from itertools import product

import torch
from torch import Tensor

import echokernels
from bench import formulas, inputs
from bench.case import Case, Check, Outputs, Peer
from bench.checks import MOST_DEVIATIONS, against, drawn_by_probability, most_likely
from bench.decode import decodes
from bench.inputs import randn
from bench.int8_kv import QUANTISED, decodes_int8, int8_rows, prefills_int8
from bench.moe import experts
from bench.moe_layers import expert_layers
from bench.peers import formula_peers, four_kernels
from bench.prefill import prefills
from bench.projections import projections, with_epilogue
from bench.suites import FULL, QUICK, Suite

__all__ = ["FULL", "QUICK", "cases"]

EPS = 1e-6
INT8, BF16, FP32 = 1, 2, 4  # bytes of an element
# The largest relative errors of a row that are right.
ROUNDED = 2.0**-7  # a rounding to bf16 costs up to 2^-8, and plain formulas round twice
EXACT = 0.0
SAMPLED = (torch.float32, torch.bfloat16)  # dtypes of logits


def cases(s: Suite) -> list[Case]:
    return [
        *(_rms_norm(s, t, h) for t, h in product(s.tokens, s.hidden)),
        *(_fused_add_rms_norm(s, t, h) for t, h in product(s.tokens, s.hidden)),
        *(_gated(s, "silu_and_mul", t) for t in s.tokens),
        *(_gated(s, "gelu_and_mul", t) for t in s.tokens),
        *(_gated(s, "gelu_tanh_and_mul", t) for t in s.tokens),
        *(_rms_norm_quant(s, t, h) for t, h in product(s.tokens, s.hidden)),
        *(_silu_and_mul_quant(s, t) for t in s.tokens),
        *(_rotary_embedding(s, t) for t in s.tokens),
        *(_reshape_and_cache(s, t) for t in s.tokens),
        *(_fused_qk_norm_rope_cache(s, t) for t in s.tokens),
        *projections(s),
        *prefills(s),
        *decodes(s),
        *int8_rows(s),
        *prefills_int8(s),
        *decodes_int8(s),
        *(_merge_attn_states(s, t) for t in s.merged_tokens),
        *experts(s),
        *expert_layers(s),
        *(_sample_greedy(s, rows) for rows in s.sampled_rows),
        *(_sample_temperature(s, rows) for rows in s.sampled_rows),
        *(_sample_top_k_top_p(s, rows, s.vocab, torch.float32) for rows in s.sampled_rows),
        *(_sample_top_k_top_p(s, *shape, d) for shape, d in product(s.sampled_wide, SAMPLED)),
        *(_sample_top_p(*shape, d) for shape, d in product(s.sampled_wide, SAMPLED)),
    ]


def _rms_norm(s: Suite, tokens: int, hidden: int) -> Case:
    return Case(
        "rms_norm",
        f"T{tokens}_H{hidden}",
        make=lambda d: (randn(d, tokens, hidden), randn(d, hidden), EPS),
        run=echokernels.rms_norm,
        check=against(formulas.rms_norm),
        tolerance=ROUNDED,
        num_bytes=(2 * tokens + 1) * hidden * BF16,
        ceiling="copy",
        peers=formula_peers(formulas.rms_norm, s.compile_modes),
    )


def _fused_add_rms_norm(s: Suite, tokens: int, hidden: int) -> Case:
    return Case(
        "fused_add_rms_norm",
        f"T{tokens}_H{hidden}",
        make=lambda d: (randn(d, tokens, hidden), randn(d, tokens, hidden), randn(d, hidden), EPS),
        run=echokernels.fused_add_rms_norm,
        check=against(formulas.fused_add_rms_norm),
        tolerance=ROUNDED,
        num_bytes=(4 * tokens + 1) * hidden * BF16,
        ceiling="copy",
        peers=formula_peers(formulas.fused_add_rms_norm, s.compile_modes),
        in_place=True,
    )


def _gated(s: Suite, op: str, tokens: int) -> Case:
    formula = getattr(formulas, op)
    return Case(
        op,
        f"T{tokens}",
        make=lambda d: (randn(d, tokens, 2 * s.intermediate),),
        run=getattr(echokernels, op),
        check=against(formula),
        tolerance=ROUNDED,
        num_bytes=3 * tokens * s.intermediate * BF16,
        ceiling="copy",
        peers=formula_peers(formula, s.compile_modes),
    )


def _rms_norm_quant(s: Suite, tokens: int, hidden: int) -> Case:
    def run(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Outputs:
        return *echokernels.rms_norm_quant(x, weight, eps, residual), residual

    row_bytes = hidden * (3 * BF16 + INT8) + FP32
    return Case(
        "rms_norm_quant",
        f"add_int8_T{tokens}_H{hidden}",
        make=lambda d: (randn(d, tokens, hidden), randn(d, tokens, hidden), randn(d, hidden), EPS),
        run=run,
        check=against(formulas.add_rms_norm_quant),
        tolerance=QUANTISED,
        num_bytes=tokens * row_bytes + hidden * BF16,
        ceiling="copy",
        peers=formula_peers(formulas.add_rms_norm_quant, s.compile_modes),
    )


def _silu_and_mul_quant(s: Suite, tokens: int) -> Case:
    return Case(
        "silu_and_mul_quant",
        f"int8_T{tokens}",
        make=lambda d: (randn(d, tokens, 2 * s.intermediate),),
        run=echokernels.silu_and_mul_quant,
        check=against(formulas.silu_and_mul_quant),
        tolerance=QUANTISED,
        num_bytes=tokens * (s.intermediate * (2 * BF16 + INT8) + FP32),
        ceiling="copy",
        peers=formula_peers(formulas.silu_and_mul_quant, s.compile_modes),
    )


def _rotary_embedding(s: Suite, tokens: int) -> Case:
    def run(positions: Tensor, query: Tensor, key: Tensor, table: Tensor) -> Outputs:
        echokernels.rotary_embedding(positions, query, key, s.head_dim, table)
        return query, key

    row_bytes = (
        2 * (s.heads + s.kv_heads) * s.head_dim * BF16 + s.head_dim * FP32
    )  # and the table's
    return Case(
        "rotary_embedding",
        f"T{tokens}",
        make=lambda d: inputs.rotary(d, tokens, s.heads, s.kv_heads, s.head_dim),
        run=run,
        check=against(formulas.rotary_embedding),
        tolerance=ROUNDED,
        num_bytes=tokens * row_bytes,
        ceiling="copy",
        peers=formula_peers(formulas.rotary_embedding, s.compile_modes),
        in_place=True,
    )


def _reshape_and_cache(s: Suite, tokens: int) -> Case:
    def run(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> Outputs:
        echokernels.reshape_and_cache(key, value, k_cache, v_cache, slots)
        return k_cache, v_cache

    return Case(
        "reshape_and_cache",
        f"T{tokens}",
        make=lambda d: inputs.page_write(d, tokens, s.kv_heads, s.head_dim),
        run=run,
        check=against(formulas.reshape_and_cache),
        tolerance=EXACT,
        num_bytes=2 * 2 * tokens * s.kv_heads * s.head_dim * BF16,
        ceiling="copy",
        peers=formula_peers(formulas.reshape_and_cache, s.compile_modes),
    )


def _fused_qk_norm_rope_cache(s: Suite, tokens: int) -> Case:
    read, written = s.heads + 2 * s.kv_heads, s.heads + 3 * s.kv_heads  # heads; keys in two places
    row_bytes = s.head_dim * ((read + written) * BF16 + FP32)  # and the table's
    return Case(
        "fused_qk_norm_rope_cache",
        f"T{tokens}",
        make=lambda d: inputs.projected(d, tokens, s.heads, s.kv_heads, s.head_dim, EPS),
        run=partial(with_epilogue, echokernels.fused_qk_norm_rope_cache, s),
        check=against(formulas.fused_qk_norm_rope_cache),
        tolerance=ROUNDED,
        num_bytes=tokens * row_bytes,
        ceiling="copy",
        peers={
            **formula_peers(formulas.fused_qk_norm_rope_cache, s.compile_modes),
            "echo-4-kernels": four_kernels(),
        },
        in_place=True,
    )


def _merge_attn_states(s: Suite, tokens: int) -> Case:
    return Case(
        "merge_attn_states",
        f"T{tokens}",
        make=lambda d: inputs.attention_states(d, tokens, s.heads, s.head_dim),
        run=echokernels.merge_attn_states,
        check=against(formulas.merge_attn_states),
        tolerance=ROUNDED,
        num_bytes=3 * tokens * s.heads * (s.head_dim * BF16 + FP32),
        ceiling="copy",
        peers=formula_peers(formulas.merge_attn_states, s.compile_modes),
    )


def _sample_greedy(s: Suite, rows: int) -> Case:
    peers = formula_peers(lambda logits, *_: logits.argmax(-1), s.compile_modes)
    return _sample("greedy", rows, s.vocab, torch.float32, (0.0, 0, 1.0), most_likely, peers)


def _sample_temperature(s: Suite, rows: int) -> Case:
    peers = formula_peers(formulas.sample_temperature, s.compile_modes)
    filters = (0.8, 0, 1.0)
    return _sample(
        "temperature", rows, s.vocab, torch.float32, filters, drawn_by_probability, peers
    )


def _sample_top_k_top_p(s: Suite, rows: int, vocab: int, dtype: torch.dtype) -> Case:
    peers = {
        **formula_peers(
            lambda *args: formulas.sample_top_k(s.top_k, *args), s.compile_modes, suffix="-topk"
        ),
        **formula_peers(formulas.sample_sorted, (), suffix="-sort"),
    }
    name, filters = f"top_k{s.top_k}_top_p0.9", (0.8, s.top_k, 0.9)
    return _sample(name, rows, vocab, dtype, filters, drawn_by_probability, peers)


def _sample_top_p(rows: int, vocab: int, dtype: torch.dtype) -> Case:
    peers = formula_peers(formulas.sample_sorted, (), suffix="-sort")
    return _sample("top_p0.9", rows, vocab, dtype, (0.8, 0, 0.9), drawn_by_probability, peers)


def _sample(
    name: str,
    rows: int,
    vocab: int,
    dtype: torch.dtype,
    filters: tuple[float, int, float],  # temperature, top_k, top_p
    check: Check,
    peers: Mapping[str, Peer],
) -> Case:
    return Case(
        "sample",
        f"{name}_{rows}x{vocab}" + ("_bf16" if dtype == torch.bfloat16 else ""),
        make=lambda d: inputs.sampling(d, rows, vocab, *filters, dtype),
        run=echokernels.sample,
        check=check,
        tolerance=MOST_DEVIATIONS if check is drawn_by_probability else EXACT,
        num_bytes=rows * vocab * dtype.itemsize,
        ceiling="read",
        peers=peers,
    )
