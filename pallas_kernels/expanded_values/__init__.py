"""Attended coefficients of values, expanded, and merged with exact tokens that the same queries attend to."""

from lowrank_kv_jax.pallas_kernels.expanded_values.api import expanded_values

__all__ = ["expanded_values"]
