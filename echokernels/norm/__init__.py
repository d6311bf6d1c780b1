"""Normalisation ops: RMSNorm, plain and fused with the residual addition."""
