"""Normalisation ops: RMSNorm, plain, after a residual addition, with quantised output."""
