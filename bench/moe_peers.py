"""vLLM's layer of experts as a peer: its Triton kernel with its own table of tiles for an H200, its
activation and its sum."""

import json
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bench.case import Outputs, Peer
from bench.moe_layers import Layer
from bench.timing import Call

Align = Callable[[Tensor, int, int], tuple[Tensor, Tensor, Tensor]]
"""(ids, experts, block size) to (sorted ids, block experts, number of padded ids)."""


def vllm(align: Align) -> dict[str, Peer]:
    """Of the shapes that the table is for."""
    kernel = import_module("vllm.fused_moe_kernel").fused_moe_kernel
    tables = Path(import_module("vllm").__path__[0]).glob("moe_E*_N*_H200.json")
    tiles = {path.stem.rsplit("_", 1)[0]: json.loads(path.read_text()) for path in tables}

    def prepare(x: Tensor, layer: Layer, weights: Tensor, ids: Tensor) -> Call:
        w1, _ = layer.weights()
        table = tiles[f"moe_E{len(w1)}_N{w1.shape[1] // 2}"]
        return lambda: _layer(kernel, align, table, x, *layer.weights(), weights, ids)

    return {"vllm": Peer(prepare, needs=frozenset({"qwen3-30b-a3b"}))}


def _layer(
    kernel: Any, align: Align, table: Mapping[str, Any], x: Tensor, w1: Tensor, w2: Tensor,
    weights: Tensor, ids: Tensor,
) -> Outputs:  # fmt: skip
    (tokens, k), experts, width = ids.shape, len(w1), w2.shape[2]
    sizes = [int(size) for size in table if size.isdigit()]
    tile = dict(table[str(min(sizes, key=lambda size: abs(size - tokens)))])
    if tokens * k * 4 <= experts:
        num_padded = ids.new_full((1,), ids.numel() * tile["BLOCK_SIZE_M"])
        order = None, ids.view(-1), num_padded
    else:
        order = align(ids, experts, tile["BLOCK_SIZE_M"])  # type: ignore[assignment]
    gates = x.new_empty(tokens, k, 2 * width)
    between = x.new_empty(tokens * k, width)
    products = x.new_empty(tokens, k, x.shape[1])
    out = torch.empty_like(x)
    _multiply(kernel, x, w1, gates, weights, order, False, k, tile)
    torch.ops._C.silu_and_mul(between, gates.view(-1, 2 * width))
    _multiply(kernel, between, w2, products, weights, order, True, 1, tile)
    torch.ops._moe_C.moe_sum(products, out, None, None)
    return out


def _multiply(
    kernel: Any, a: Tensor, b: Tensor, c: Tensor, weights: Tensor, order: Any, weighs: bool,
    k: int, tile: Mapping[str, Any],
) -> None:  # fmt: skip
    sorted_ids, block_experts, num_padded = order
    tile = {"SPLIT_K": 1, **tile}
    block_k = tile.pop("BLOCK_SIZE_K")
    rows = len(a) * k
    if sorted_ids is None:
        most = rows * tile["BLOCK_SIZE_M"]
    else:
        most = len(sorted_ids)
        if len(a) < tile["BLOCK_SIZE_M"]:
            most = min(most, rows * tile["BLOCK_SIZE_M"])
    row_tiles = triton.cdiv(most, tile["BLOCK_SIZE_M"])
    kernel[(row_tiles * triton.cdiv(b.shape[1], tile["BLOCK_SIZE_N"]),)](
        a, b, c, None, None, None, weights, sorted_ids, block_experts, num_padded, b.shape[1],
        b.shape[2], most, rows, *a.stride(), b.stride(0), b.stride(2), b.stride(1), c.stride(1),
        c.stride(2), 0, 0, 0, 0, 0, 0, 0, 0, 0, MUL_ROUTED_WEIGHT=weighs, top_k=k,
        compute_type=tl.bfloat16, use_fp8_w8a8=False, use_int8_w8a8=False, use_int8_w8a16=False,
        per_channel_quant=False, naive_block_assignment=sorted_ids is None, HAS_BIAS=False,
        BLOCK_SIZE_K=block_k, SWAP_AB=False, USE_TD=False, **tile,
    )  # fmt: skip
