"""Mixture of experts: which experts a token goes to, and what they do with it."""
