"""Gated activation ops: SwiGLU and GeGLU."""
