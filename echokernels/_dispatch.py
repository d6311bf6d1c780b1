"""Calls of an op on a GPU: a replay of a call like this one, or the long way.

A function of the op's own arguments is generated, for what it reads of them costs as much as all
the rest. For `silu_and_mul(Tensor(a!) out, Tensor x)` it is

    def call(out, x):
        _p0 = out.data_ptr()
        _p1 = x.data_ptr()
        _scalars = ((_p0 | _p1) & 15 and (_p0 & 15, _p1 & 15),)
        _scalars_of, _matches, _launch_again = _replays.get(None, _nothing)
        if _scalars != _scalars_of or not _matches(out, x):
            _key = (_scalars, out.shape, out.stride(), out.dtype, out.get_device(), ...)
            ...
        _launch_again(_p0, _p1)

so that Triton's specialisation on pointers that are multiples of 16 bytes is in the key too. A call
like the one before, as the layers of a model make them, is told by PyTorch's own guards: its key
would take longer to make.

PyTorch's dispatcher takes as long as that again to hand an op's arguments over. So the library's
own functions call a `shortcut` around it, which makes the same replay when the guards say that the
dispatcher would end there too, and nobody watches.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch

from echokernels import _replay
from echokernels._launch import record

_CACHED = f"""
def call({{parameters}}):
    {{pointers}}
    _scalars = {{scalars}}
    _scalars_of, _matches, _launch_again = _replays.get(None, _nothing)
    _key = None
    if _scalars != _scalars_of or not _matches({{tensor_names}}):
        _key = (_scalars, {{metadata}})
        _known = _replays.get(_key)
        if _known is None:
            _launch_again = None
        else:
            if not _known[1]({{tensor_names}}):
                _known = _renewed(_replays, _key, ({{tensor_names}},))
            _replays[None] = _known
            _launch_again = _known[2]
    _bypassed = {_replay.IS_BYPASSED}
    if _launch_again is None or _bypassed or (_is_grad_enabled() and ({{requires_grad}})):
        return _slow(None if _bypassed else _key, {{arguments}})
    _launch_again({{pointer_names}})
"""

# Modes, transforms and subclasses of tensors show in the keys that the guards compare. Only behind
# the guards are these tensors that have a pointer.
_SHORTCUT = f"""
def call({{parameters}}):
    _scalars_of, _matches, _launch_again = _replays.get(None, _nothing)
    if _is_compiling() or not _matches({{tensor_names}}) or _is_profiled() or _function_modes():
        return _op({{arguments}})
    {{pointers}}
    if ({{scalars}} != _scalars_of or {_replay.IS_BYPASSED}
            or (_is_grad_enabled() and ({{requires_grad}}))):
        return _op({{arguments}})
    _launch_again({{pointer_names}})
"""

_NOTHING = _replay.Known(None, lambda *_: False, lambda *_: None)


def cached_call(
    schema: str, run: Callable[..., None], replays: _replay.Cache
) -> Callable[..., None]:
    """`run`, which takes the arguments of `schema`, replayed where that can be.

    `run` checks its arguments and launches kernels through `_launch.launch`; what it does must
    follow from their metadata.
    """
    _, is_tensor = _arguments(schema)

    def slow(key: tuple[Hashable, ...] | None, *args: Any) -> None:
        if key is None:
            run(*args)
        else:
            args = _distinct(args)
            with record() as recording:
                run(*args)
            tensors = [arg for arg, wanted in zip(args, is_tensor, strict=True) if wanted]
            _replay.remember(replays, key, recording, tensors)

    return _define(_CACHED, schema, {"_replays": replays, "_slow": slow})


def shortcut(schema: str, op: Callable[..., None], replays: _replay.Cache) -> Callable[..., None]:
    """The op of `schema`, past the dispatcher where a call is like the last one in `replays`."""
    names = {
        "_replays": replays,
        "_op": op,
        "_is_compiling": torch.compiler.is_compiling,
        "_is_profiled": torch._C._autograd._profiler_enabled,
        "_function_modes": torch._C._len_torch_function_stack,
    }
    return _define(_SHORTCUT, schema, names)


def _define(template: str, schema: str, names: dict[str, Any]) -> Callable[..., None]:
    names |= {
        "_nothing": _NOTHING,
        "_renewed": _replay.renewed,
        "_is_grad_enabled": torch.is_grad_enabled,
        **_replay.BYPASS_NAMES,
    }
    exec(_source(template, *_arguments(schema)), names)
    return names["call"]


def _arguments(schema: str) -> tuple[list[Any], list[bool]]:
    """Of an op, and which of them are tensors."""
    arguments = torch._C.parse_schema(schema).arguments
    types = [a.type.getElementType() if _optional(a) else a.type for a in arguments]
    return arguments, [isinstance(t, torch.TensorType) for t in types]


def _source(template: str, arguments: list[Any], is_tensor: list[bool]) -> str:
    tensors = [a for a, wanted in zip(arguments, is_tensor, strict=True) if wanted]
    pointers = [f"_p{index}" for index in range(len(tensors))]
    scalars = "".join(
        f"{a.name} is None, " if wanted else f"{a.name}, "
        for a, wanted in zip(arguments, is_tensor, strict=True)
        if not wanted or _optional(a)
    )
    offsets = ", ".join(f"{p} & 15" for p in pointers)
    return template.format(
        # The dispatcher leaves out trailing arguments that have their defaults.
        parameters=", ".join(
            f"{a.name}={a.default_value!r}" if a.has_default_value() else a.name for a in arguments
        ),
        arguments=", ".join(a.name for a in arguments),
        pointers="\n    ".join(
            f"{p} = " + _unless_none(a, f"{a.name}.data_ptr()", "0")
            for p, a in zip(pointers, tensors, strict=True)
        ),
        scalars=f"({scalars}({' | '.join(pointers)}) & 15 and ({offsets},),)",
        tensor_names=", ".join(a.name for a in tensors),
        metadata=", ".join(_metadata(a) for a in tensors),
        pointer_names=", ".join(pointers),
        requires_grad=" or ".join(
            f"({_unless_none(a, f'{a.name}.requires_grad', 'False')})" for a in tensors
        ),
    )


def _metadata(argument: Any) -> str:
    name = argument.name
    fields = f"{name}.shape, {name}.stride(), {name}.dtype, {name}.get_device()"
    return _unless_none(argument, f"({fields})", "None") if _optional(argument) else fields


def _unless_none(argument: Any, value: str, absent: str) -> str:
    return f"{absent} if {argument.name} is None else {value}" if _optional(argument) else value


def _optional(argument: Any) -> bool:
    return isinstance(argument.type, torch.OptionalType)


def _distinct(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A tensor that is given twice becomes two: each place is traced by itself, for the next call
    like this one may give different ones."""
    seen: set[int] = set()
    result = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            arg = arg.detach() if id(arg) in seen else arg
            seen.add(id(arg))
        result.append(arg)
    return tuple(result)
