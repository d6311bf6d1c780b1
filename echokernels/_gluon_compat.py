"""Gluon's names across Triton versions: the one place that maps them.

Triton 3.6 calls the barrier of a program's threads `thread_barrier`, 3.7 `barrier`; `aggregate`,
which makes a class of kernel values, has no public name yet. Gluon kernels import them from here.
"""

from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

__all__ = ["aggregate", "barrier"]
