"""Principal subspaces of wide second-moment matrices by randomised subspace iteration.

Halko, Martinsson and Tropp, 2011, "Finding structure with randomness", with the orthonormalisation of Fukaya
et al., 2020, "Shifted Cholesky QR". At a width of 960 and a rank of 300 a full eigendecomposition costs ten
times as much.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Float32

from lowrank_kv_jax.estimators.linalg import orthonormalise
from lowrank_kv_jax.estimators.svd import principal_subspace
from lowrank_kv_jax.storage.precise import einsum, matmul

ITERATIONS = 2
SMALL = 256  # up to this width a full eigendecomposition is the cheaper way
FLOOR = 1e-7  # of the trace: what float32 cannot tell from zero


def wide_gram(x: Float[jax.Array, "B S 1 W"]) -> Float32[jax.Array, "B 1 W W"]:
    """X^T X of wide tokens `[B, S, 1, W]`, float32 `[B, 1, W, W]`: three quarters of the work of a plain product."""
    x = x[:, :, 0].astype(jnp.float32)
    half = x.shape[-1] // 2

    def product(x, y):
        return einsum("bsv,bsw->bvw", x, y)

    left, right = x[..., :half], x[..., half:]
    corner = product(left, right)
    top = jnp.concatenate([product(left, left), corner], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([corner.mT, product(right, right)], axis=-1)], axis=-2)[:, None]


def leading_subspace(
    moment: Float[jax.Array, "*lead W W"], rank: int, iterations: int = ITERATIONS
) -> Float32[jax.Array, "*lead W R"]:
    """An orthonormal basis of (nearly) the principal subspace of a second moment, leading directions first.

    Small or nearly full problems are decomposed exactly. Otherwise the residual energy tr(M) - tr(U^T M U)
    is within 1.01 times the optimum (Eckart and Young) plus 1e-6 tr(M) where eigenvalues fall, and within 1.04 where
    those behind the rank are all nearly as large as those before it, also where M has a lower rank than asked for: what
    is missing is filled with arbitrary orthonormal directions.

    Args:
        moment: symmetric positive semidefinite float32 `[..., W, W]`.
        rank: R in 1..W.
        iterations: multiplications by the moment after the first; O(W^2 R) each.

    Returns:
        float32 `[..., W, R]`. Deterministic: the start is a fixed random matrix.
    """
    width = moment.shape[-1]
    tried = rank + rank // 8 + 16
    if width <= SMALL or 3 * tried > 2 * width:
        return principal_subspace(moment, rank)
    moment = moment.astype(jnp.float32)
    # adding a multiple of I moves no eigenvector, and lets a deficient moment fill every column of the start
    trace = jnp.trace(moment, axis1=-2, axis2=-1)[..., None, None]
    moment = moment + jnp.where(trace > 0, FLOOR * trace, 1.0) * jnp.eye(width, dtype=jnp.float32)
    basis = jax.random.normal(jax.random.key(0), (width, tried), jnp.float32)
    basis = jnp.broadcast_to(basis, (*moment.shape[:-2], width, tried))
    # between two steps well-conditioned columns are enough: two passes, and three at the end
    basis = orthonormalise(matmul(moment, basis), passes=2)
    for step in range(iterations):
        image = matmul(moment, basis)
        # a root of the iteration's polynomial in the middle of the unwanted spectrum: twice as fast as powers
        energy, norm = (jnp.sum(basis * x, axis=-2, keepdims=True) for x in (image, basis))
        unwanted = jnp.min(energy / norm, axis=-1, keepdims=True)
        passes = 3 if step + 1 == iterations else 2
        basis = orthonormalise(image - 0.5 * unwanted * basis, passes)
    within = matmul(basis.mT, matmul(moment, basis))
    return matmul(basis, principal_subspace(within, rank))
