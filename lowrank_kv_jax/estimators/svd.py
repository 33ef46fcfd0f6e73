"""Principal subspaces of second-moment matrices (the right singular vectors of the stacked tokens)."""

import jax
import jax.numpy as jnp

from lowrank_kv_jax.estimators.linalg import eigenvectors


def second_moment(x: jax.Array, weight: jax.Array | None = None) -> jax.Array:
    """Sum of outer products `[B, J, W, W]`, float32, of tokens `[B, T, J, W]` weighted by `[B, T]`."""
    x = x.astype(jnp.float32)
    left = x if weight is None else x * weight[:, :, None, None]
    # heads first: the layout in which XLA runs one matrix product per head
    left, right = left.transpose(0, 2, 3, 1), x.transpose(0, 2, 1, 3)
    return jnp.matmul(left, right, precision=jax.lax.Precision.HIGHEST)


def principal_subspace(moment: jax.Array, rank: int) -> jax.Array:
    """Leading `rank` eigenvectors `[..., W, R]`, leading first, of symmetric `[..., W, W]`; O(W^3)."""
    return eigenvectors(moment)[..., ::-1][..., :rank]
