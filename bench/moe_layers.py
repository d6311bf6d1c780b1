"""Cases of whole layers of experts: few tokens read the weights they chose, many multiply."""

from collections.abc import Callable
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

import echokernels
from bench import formulas
from bench.case import Case, Inputs, Outputs, returning
from bench.checks import row_error, to_double
from bench.inputs import randn
from bench.suites import Experts, Suite

BF16 = 2  # bytes
ROUNDED = 2.0**-6  # what is between the products and behind them, and weights in bf16 by some
_FEW = 64  # tokens, that wait for memory


class Layer:
    """Weights (w1, w2) of equal content at two places, in turns. An input set holds the layer, not
    its tensors, for gigabytes should not be copied to leave the L2 cache."""

    def __init__(self, device: torch.device, shape: Experts) -> None:
        w1 = randn(device, shape.count, 2 * shape.width, shape.hidden).mul_(shape.hidden**-0.5)
        w2 = randn(device, shape.count, shape.hidden, shape.width).mul_(shape.width**-0.5)
        self._places = cycle([(w1, w2), (w1.clone(), w2.clone())])

    def weights(self) -> tuple[Tensor, Tensor]:
        return next(self._places)


def expert_layers(s: Suite) -> list[Case]:
    return [
        _case(name, shape, tokens, skewed)
        for name, shape in s.expert_layers.items()
        for skewed, counts in ((False, shape.tokens), (True, shape.skewed_tokens))
        for tokens in counts
    ]


def _case(name: str, shape: Experts, tokens: int, skewed: bool) -> Case:
    weight_bytes = 3 * shape.hidden * shape.width * BF16
    return Case(
        "fused_moe",
        f"{name}_T{tokens}{'_skewed' if skewed else ''}",
        make=partial(_make, shape, tokens, skewed),
        run=_of_layer(echokernels.fused_moe),
        check=_check,
        tolerance=ROUNDED,
        num_bytes=round(_touched(shape, tokens) * weight_bytes) + 2 * tokens * shape.hidden * BF16,
        num_flops=6 * tokens * shape.chosen * shape.hidden * shape.width,
        ceiling="read" if tokens <= _FEW else "matmul",
        tags=frozenset({name}),
        peers={"torch-grouped_mm": returning(_of_layer(formulas.fused_moe_grouped))},
    )


def _touched(shape: Experts, tokens: int) -> float:
    """Experts that are chosen, on average."""
    return shape.count * (1 - (1 - shape.chosen / shape.count) ** tokens)


def _make(shape: Experts, tokens: int, skewed: bool, device: torch.device) -> Inputs:
    scores = torch.rand(tokens, shape.count, device=device)
    if skewed:
        scores[::2, :2] += 1
    weights, ids = scores.topk(shape.chosen)
    weights /= weights.sum(1, keepdim=True)
    x = randn(device, tokens, shape.hidden)
    return x, Layer(device, shape), weights, ids.int()


def _of_layer(function: Callable[..., Outputs]) -> Callable[..., Outputs]:
    def run(x: Tensor, layer: Layer, weights: Tensor, ids: Tensor) -> Outputs:
        return function(x, *layer.weights(), weights, ids)

    return run


def _check(inputs: Inputs) -> Callable[[Outputs], float]:
    x, layer, weights, ids = (to_double(x) for x in inputs)
    w1, w2 = layer.weights()
    expected = formulas.fused_moe(x, w1, w2, weights, ids)

    def error(outputs: Outputs) -> float:
        assert isinstance(outputs, Tensor)
        return row_error(outputs, expected)

    return error
