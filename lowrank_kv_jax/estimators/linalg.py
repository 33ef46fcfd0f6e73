"""Matrix factorisations of small batches that cannot hang a CPU."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Float, Float32


def one_by_one(factorise: Callable[..., jax.Array], *matrices: jax.Array) -> jax.Array:
    """`factorise` of each matrix `[..., M, N]` of a batch; on a CPU one after the other.

    jaxlib hands the matrices of one batched LAPACK call to the thread pool that also runs the call itself, which waits
    for them. As many such calls at a time as there are threads (keys and values of a layer are enough on two cores)
    wait for each other for ever. A call with a single matrix runs where it is and needs no other thread.
    """
    batch = matrices[0].shape[:-2]
    count = 1
    for size in batch:
        count *= size
    if count == 1 or jax.default_backend() != "cpu" or jax.device_count() > 1:
        return factorise(*matrices)
    flat = tuple(x.reshape(count, *x.shape[-2:]) for x in matrices)
    out = jax.lax.map(lambda each: factorise(*each), flat)
    return out.reshape(*batch, *out.shape[1:])


def eigenvalues(matrix: Float[jax.Array, "*lead W W"]) -> Float[jax.Array, "*lead W"]:
    """Ascending eigenvalues `[..., W]` of symmetric `[..., W, W]`."""
    return one_by_one(jnp.linalg.eigvalsh, matrix)


def eigenvectors(matrix: Float[jax.Array, "*lead W W"]) -> Float[jax.Array, "*lead W W"]:
    """Eigenvectors `[..., W, W]` of symmetric `[..., W, W]`, in columns, by ascending eigenvalue."""
    return one_by_one(lambda x: jnp.linalg.eigh(x)[1], matrix)


def cholesky(matrix: Float[jax.Array, "*lead W W"]) -> Float[jax.Array, "*lead W W"]:
    """Lower Cholesky factors `[..., W, W]`."""
    return one_by_one(jnp.linalg.cholesky, matrix)


def orthonormalise(basis: Float[jax.Array, "*lead W R"]) -> Float32[jax.Array, "*lead W R"]:
    """Orthonormal columns of the same span `[..., W, R]`, float32; the triangular factor has a positive diagonal."""

    def qr(x):
        q, r = jnp.linalg.qr(x)
        sign = jnp.where(jnp.diagonal(r, axis1=-2, axis2=-1) < 0, -1.0, 1.0)
        return q * sign[..., None, :]

    return one_by_one(qr, basis.astype(jnp.float32))
