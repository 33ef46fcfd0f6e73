"""Principal subspaces of second-moment matrices (the right singular vectors of the stacked tokens)."""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Float32

from lowrank_kv_jax.estimators.by_products import iterated_spectrum, iterated_subspace
from lowrank_kv_jax.estimators.linalg import eigenvalues, eigenvectors, polish
from lowrank_kv_jax.storage import precise
from lowrank_kv_jax.storage.backend import platform


def second_moment(
    x: Float[jax.Array, "B T J W"], weight: Float[jax.Array, "B T"] | None = None
) -> Float32[jax.Array, "B J W W"]:
    """Sum of outer products `[B, J, W, W]`, float32, of tokens `[B, T, J, W]` weighted by `[B, T]`."""
    x = x.astype(jnp.float32)
    left = x if weight is None else x * weight[:, :, None, None]
    # heads first: the layout in which XLA runs one matrix product per head
    left, right = left.transpose(0, 2, 3, 1), x.transpose(0, 2, 1, 3)
    return precise.matmul(left, right)


def principal_subspace(moment: Float[jax.Array, "*lead W W"], rank: int) -> Float[jax.Array, "*lead W R"]:
    """Leading `rank` eigenvectors `[..., W, R]`, leading first, of symmetric positive semidefinite `[..., W, W]`; O(W^3).

    On a CPU they are LAPACK's, elsewhere those of `iterated_subspace`.
    """
    if platform() != "cpu":
        return iterated_subspace(moment, rank)
    return polish(eigenvectors(moment)[..., ::-1][..., :rank])


def spectrum(moment: Float[jax.Array, "*lead W W"]) -> Float[jax.Array, "*lead W"]:
    """Eigenvalues `[..., W]`, ascending, of symmetric positive semidefinite `[..., W, W]`.

    On a CPU they are LAPACK's, elsewhere those of `iterated_spectrum`, for step lengths.
    """
    return eigenvalues(moment) if platform() == "cpu" else iterated_spectrum(moment)
