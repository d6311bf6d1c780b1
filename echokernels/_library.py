"""Registration of ops: the only place that touches `torch.library`.

Every op of namespace `echo` returns nothing and mutates the tensors its schema marks, so one static
check of shapes, dtypes and strides is at once the fake implementation and the first thing the real
ones do. `torch.library.Library` (define, impl, register_fake) is used rather than `custom_op`
because a call through it costs a fraction of the host time.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from echokernels import _checks, _replay
from echokernels._dispatch import cached_call, shortcut
from echokernels._target import INTERPRETED

NVTX = os.environ.get("ECHOKERNELS_NVTX") == "1"
"""Every call of an op on a GPU is an NVTX range of its name, for Nsight Systems to show."""

_library = torch.library.Library("echo", "DEF")


@dataclass(frozen=True)
class Op:
    """One registered op. Its functions take the schema's arguments in their order."""

    name: str
    schema: str
    check: Callable[..., None]
    triton: Callable[..., None]
    reference: Callable[..., None]
    debug_check: Callable[..., None] | None = None


OPS: dict[str, Op] = {}


def define_op(
    schema: str,
    *,
    check: Callable[..., None],
    triton: Callable[..., None],
    reference: Callable[..., None],
    debug_check: Callable[..., None] | None = None,
) -> Callable[..., None]:
    """Registers `torch.ops.echo.<name>` and returns what calls it at the least cost.

    CUDA tensors get `triton`, the launcher, or a replay of what it launched for the same metadata
    (see _dispatch.py); CPU tensors get `reference`, the plain PyTorch form, or the launcher itself
    under `TRITON_INTERPRET=1`. `check` reads metadata only (it also runs on
    fake tensors) and raises ValueError or TypeError; `debug_check` may read the tensors, waits for
    the device, and runs only with `ECHOKERNELS_DEBUG=1`, outside the capture of CUDA graphs. The
    op raises ValueError when gradients are enabled and an input requires them: there is no
    backward.
    """
    name = schema[: schema.index("(")]
    op = Op(name, schema, check, triton, reference, debug_check)
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    replays = _replay.new_cache()
    _library.impl(name, _on_cuda(op, replays), "CUDA")
    _library.impl(name, _checked(op, triton if INTERPRETED else reference), "CPU")
    torch.library.register_fake(f"echo::{name}", _checked(op, _nothing), lib=_library)
    OPS[name] = op
    overload = getattr(torch.ops.echo, name).default
    return overload if NVTX or _checks.DEBUG else shortcut(schema, overload, replays)


def _on_cuda(op: Op, replays: _replay.Cache) -> Callable[..., None]:
    call = _checked(op, op.triton)
    if not _checks.DEBUG:
        call = cached_call(op.schema, call, replays)
    return _in_range(f"echo::{op.name}", call) if NVTX else call


def _in_range(name: str, call: Callable[..., None]) -> Callable[..., None]:
    def in_range(*args: Any) -> None:
        torch.cuda.nvtx.range_push(name)
        try:
            call(*args)
        finally:
            torch.cuda.nvtx.range_pop()

    return in_range


def _checked(op: Op, run: Callable[..., None]) -> Callable[..., None]:
    check = op.check

    def call(*args: Any) -> None:
        if torch.is_grad_enabled():
            _refuse_gradients(op, args)
        check(*args)
        if _checks.DEBUG and run is not _nothing:
            _check_values(op, args)
        run(*args)

    return call


def _check_values(op: Op, args: tuple[Any, ...]) -> None:
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    if op.debug_check is not None and not capturing:
        op.debug_check(*args)


def _nothing(*_: Any) -> None:
    pass


def _refuse_gradients(op: Op, args: tuple[Any, ...]) -> None:
    for index, value in enumerate(args):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            argument = getattr(torch.ops.echo, op.name).default._schema.arguments[index].name
            raise ValueError(
                f"{op.name}: {argument}.requires_grad is True, must be False: "
                "the op has no backward; call it under torch.no_grad() or torch.inference_mode()"
            )
