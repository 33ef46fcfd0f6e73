"""Attention over cached tokens as they are stored: exact keys and values, or coefficients in a basis."""

from lowrank_kv_jax.pallas_kernels.coefficient_attention.api import attend_to, coefficient_attention

__all__ = ["attend_to", "coefficient_attention"]
