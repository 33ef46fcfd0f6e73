"""Attention over coefficients in chunks, each read in a basis of its own."""

from lowrank_kv_jax.pallas_kernels.chunked_attention.api import chunked_attention

__all__ = ["chunked_attention"]
