"""Exact causal attention of a prompt with itself, without a number for every pair of its tokens."""

from lowrank_kv_jax.pallas_kernels.causal_attention.api import causal_attention, causal_partial

__all__ = ["causal_attention", "causal_partial"]
