"""Attention over keys that are stored as coefficients and rebuilt, and rotated if need be, on read."""

from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention.api import rotary_coefficient_attention

__all__ = ["rotary_coefficient_attention"]
