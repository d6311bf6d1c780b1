"""Quantisation of rows: what the ops with quantised outputs share."""
