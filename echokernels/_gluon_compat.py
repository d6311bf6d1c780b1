"""Gluon's names across Triton versions: the one place that maps them.

Triton 3.6 calls the barrier of a program's threads `thread_barrier`, 3.7 `barrier`; `aggregate`,
which makes a class of kernel values, has no public name yet. Gluon kernels import them from here.
"""

import linecache
from typing import Any, TypeVar, dataclass_transform

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

Class = TypeVar("Class", bound=type[Any])


@dataclass_transform()
def aggregate(cls: Class) -> Class:
    """A class of kernel values, made from its annotated fields in their order. What is given for a
    field of `gl.constexpr` becomes one."""
    fields = cls.__annotations__
    values = {n: f"gl.constexpr({n})" if t is gl.constexpr else n for n, t in fields.items()}
    lines = [f"def __init__(self, {', '.join(fields)}):"]
    lines += [f"    self.{name} = {value}" for name, value in values.items()]
    names = {"gl": gl, "__name__": cls.__module__}
    # Triton asks for the source, and its hash is part of what tells compiled kernels apart.
    source, path = "\n".join(lines) + "\n", f"<fields of {cls.__module__}.{cls.__qualname__}>"
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    exec(compile(source, path, "exec"), names)
    cls.__init__ = gluon.constexpr_function(names["__init__"])
    result: Class = _aggregate(cls)
    return result


__all__ = ["aggregate", "barrier"]
