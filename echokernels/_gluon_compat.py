"""Gluon's names across Triton versions: the one place that maps them.

Triton 3.6 calls the barrier of a program's threads `thread_barrier`, 3.7 `barrier`; Gluon kernels
import it from here.
"""

from triton.experimental.gluon import language as gl

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

__all__ = ["barrier"]
