"""Sampling op: temperature, top-k, top-p, min-p and seeded noise in one pass per row."""
