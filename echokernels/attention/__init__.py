"""Attention ops: prefill, paged decode, merging of partial states, rotary embedding and the paged
KV cache."""
