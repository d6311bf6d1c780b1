"""What ours is compared with: the formula, eager and compiled, and PyTorch's fused attention."""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.case import Outputs, Peer
from bench.inputs import Sequence
from bench.timing import Call

_SDPA_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "math": SDPBackend.MATH,
}


def formula_peers(
    formula: Callable[..., Outputs], compile_modes: tuple[str, ...], suffix: str = ""
) -> dict[str, Peer]:
    """`torch`, and one `compile` for each mode."""
    peers = {f"torch{suffix}": _bound(formula)}
    for mode in compile_modes:
        name = "compile" if mode == "default" else f"compile-{mode}"
        # With fullgraph a fallback to eager is an error and not a slow figure.
        compiled = torch.compile(formula, fullgraph=True, dynamic=False, mode=mode)
        peers[name + suffix] = _bound(compiled)
    return peers


def sdpa_peers(
    backends: tuple[str, ...],
    sequences: Callable[..., Iterable[Sequence]],
    *,
    causal: bool,
    suffix: str = "",
) -> dict[str, Peer]:
    """scaled_dot_product_attention of the sequences: of one length, and stacked beforehand."""

    def prepare(*inputs: object) -> Call:
        stacked = map(torch.stack, zip(*sequences(*inputs), strict=True))
        q, k, v = (x.transpose(1, 2) for x in stacked)  # views [num_seqs, heads, tokens, head_dim]
        return lambda: functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, enable_gqa=True
        ).transpose(1, 2)

    return {
        f"sdpa-{name}{suffix}": Peer(prepare, partial(sdpa_kernel, _SDPA_BACKENDS[name]))
        for name in backends
    }


def _bound(function: Callable[..., Outputs]) -> Peer:
    return Peer(lambda *inputs: partial(function, *inputs))
