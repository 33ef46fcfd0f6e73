"""Votes of decoded queries for the tokens that they attend to, added to those that are there."""

from lowrank_kv_jax.pallas_kernels.votes.api import add_votes

__all__ = ["add_votes"]
