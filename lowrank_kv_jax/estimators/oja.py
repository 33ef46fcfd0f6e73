"""Oja's rule for a subspace (Oja, 1982; OjaKV, section 5.2 and Algorithm 1), in batch form."""

import jax
import jax.numpy as jnp

from lowrank_kv_jax.estimators.svd import orthonormalise

NORMALIZATIONS = ("spectral", "token", "none")


def oja_update(basis: jax.Array, x: jax.Array, weight: jax.Array, eta: float, normalize: str) -> jax.Array:
    """One batch step U <- orth(U + eta (X - U Y) Y^T) with Y = U^T X.

    With raw activations the step as printed in the paper is far too long: once eta ||C|| >> 1 the term (I - P) C U
    outweighs U and the orthonormalised basis spans the *complement* of the principal subspace. Hence:

    * "spectral" divides by the largest eigenvalue of Y Y^T: eta = 1 is one step of orthogonal iteration on the residual.
    * "token" divides each token's outer product by its ||x||^2, so that large tokens do not outvote the rest.
    * "none" is the paper's literal rule.

    Args:
        basis: orthonormal `[B, J, W, R]`.
        x: tokens `[B, T, J, W]`.
        weight: `[B, T]`, 0 leaves a token out. Rows without any token keep their basis.
        eta: step size.
        normalize: one of `NORMALIZATIONS`.

    Returns:
        Orthonormal basis, float32.
    """
    u = basis.astype(jnp.float32)
    x = x.astype(jnp.float32)
    w = weight.astype(jnp.float32)[:, :, None]
    if normalize == "token":
        norm = jnp.sum(x * x, axis=-1)
        w = w / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny)
    y = jnp.einsum("btjw,bjwr->btjr", x, u)
    weighted = y * jnp.broadcast_to(w, y.shape[:3])[..., None]
    inner = jnp.einsum("btjr,btjp->bjrp", weighted, y)
    step = jnp.einsum("btjw,btjr->bjwr", x, weighted) - jnp.einsum("bjwr,bjrp->bjwp", u, inner)
    if normalize == "spectral":
        largest = jnp.linalg.eigvalsh(inner)[..., -1][..., None, None]
        step = step / jnp.maximum(largest, jnp.finfo(jnp.float32).tiny)
    moved = orthonormalise(u + eta * step)
    fed = jnp.sum(weight, axis=1) > 0
    return jnp.where(fed[:, None, None, None], moved, u)
