"""A decoded token of every row, written where it belongs, and the query that attends to it."""

from lowrank_kv_jax.pallas_kernels.append_token.api import append_token

__all__ = ["append_token"]
