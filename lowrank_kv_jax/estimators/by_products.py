"""Principal subspaces by matrix products and Cholesky factors alone, for accelerators.

A GPU decomposes the matrices of a batch one after the other (cuSOLVER's syevd, geqrf, orgqr); products and Cholesky
factors it takes of all at once.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Float32

from lowrank_kv_jax.estimators.linalg import cholesky, least_eigenvalue, orthonormalise, polish
from lowrank_kv_jax.storage.precise import gram, matmul

STEPS = 16
MORE = 16  # directions beside those that are asked for: what separates these from the rest
FLOOR = 1e-7  # of the trace: what float32 cannot tell from zero
RIDGE = 1e-6  # of the trace, without which a deficient moment would have no Cholesky factor in float32


def iterated_subspace(moment: Float[jax.Array, "*lead W W"], rank: int) -> Float32[jax.Array, "*lead W R"]:
    """An orthonormal basis of (nearly) the principal subspace of a second moment, leading directions first.

    Orthogonal iteration (Golub and Van Loan, section 8.2.4) from a fixed random start: orthonormalising keeps nested
    spans, so that the first columns turn to the leading directions, and those behind `rank` take away what does not
    belong to them. The residual energy tr(M) - tr(U^T M U) is within 1.02 times the optimum plus 3e-6 tr(M).

    Args:
        moment: symmetric positive semidefinite `[..., W, W]`.
        rank: R in 1..W.
    """
    width = moment.shape[-1]
    tried = min(rank + MORE, width)
    moment = moment.astype(jnp.float32)
    trace = jnp.trace(moment, axis1=-2, axis2=-1)[..., None, None]
    # a multiple of I moves no eigenvector, and lets a deficient moment fill every column of the start
    moment = moment + jnp.where(trace > 0, FLOOR * trace, 1.0) * jnp.eye(width, dtype=jnp.float32)
    start = jax.random.normal(jax.random.key(0), (width, tried), jnp.float32)
    start = jnp.broadcast_to(start, (*moment.shape[:-1], tried))

    def image(basis: jax.Array) -> jax.Array:
        return matmul(moment, basis)

    def step(_, basis: jax.Array) -> jax.Array:
        moved = image(basis)
        if tried < width:  # a root of the iteration's polynomial in the middle of the unwanted spectrum
            unwanted = jnp.min(jnp.sum(moved * basis, axis=-2, keepdims=True), axis=-1, keepdims=True)
            moved = moved - 0.5 * unwanted * basis
        return orthonormalise(moved, passes=2)

    # a loop whose turns are known stops no device, and is compiled once
    basis = polish(jax.lax.fori_loop(0, STEPS, step, orthonormalise(image(start), passes=2)))
    return basis[..., :rank]


def iterated_spectrum(moment: Float[jax.Array, "*lead W W"]) -> Float32[jax.Array, "*lead W"]:
    """Eigenvalues of a second moment, nearly, ascending: M = L L^T becomes L^T L, again and again (Rutishauser's LR).

    They may be off by a tenth of the largest where many lie close together; the median is much nearer. A step is one
    Cholesky factor and one product, and two of them are one of QR.

    Args:
        moment: symmetric positive semidefinite `[..., W, W]`.
    """
    moment = moment.astype(jnp.float32)
    trace = jnp.trace(moment, axis1=-2, axis2=-1)[..., None, None]
    ridge = jnp.where(trace > 0, RIDGE * trace, 1.0)

    def step(_, turned: jax.Array) -> jax.Array:
        factor = cholesky(turned)
        return gram(factor)

    turned = jax.lax.fori_loop(0, STEPS, step, moment + ridge * jnp.eye(moment.shape[-1], dtype=jnp.float32))
    found = jnp.diagonal(turned, axis1=-2, axis2=-1) - ridge[..., 0]
    return jnp.sort(jnp.where(trace[..., 0] > 0, found, 0.0))


def leading_factor(
    moment: Float[jax.Array, "*lead W W"], size: int, *, shrink: bool
) -> tuple[Float32[jax.Array, "*lead l W"], Float32[jax.Array, "*lead"]]:
    """Rows S whose Gram matrix S^T S holds the `size` leading directions of a second moment M, and what was subtracted.

    With U of `iterated_subspace`, S^T S = U (U^T M U - lost I) U^T, factorised by Cholesky: directions of nearly equal
    energy, which the iteration does not tell apart, lose nothing by that. Rows are not orthogonal. The largest eigenvalue
    of M - S^T S is within 1.25 times that of the exact decomposition plus 1e-5 tr(M); the least is above -1e-5 tr(M), or
    -1e-3 tr(M) where nothing is subtracted.

    Args:
        moment: symmetric positive semidefinite `[..., W, W]`.
        size: rows asked for; there are l = min(size, W).
        shrink: subtract the energy of the direction behind those that are kept, but no more than the least has of these.
    """
    moment, width = moment.astype(jnp.float32), moment.shape[-1]
    trace = jnp.trace(moment, axis1=-2, axis2=-1)
    ridge = jnp.where(trace > 0, RIDGE * trace, 1.0)
    kept, lost, basis = moment, jnp.zeros_like(trace), None
    if size < width:
        basis = iterated_subspace(moment, size + 1)
        image = matmul(moment, basis)
        behind, basis = jnp.sum(basis * image, axis=-2)[..., size], basis[..., :size]
        kept = matmul(basis.mT, image[..., :size])
        kept = (kept + kept.mT) / 2
    ridged = kept + ridge[..., None, None] * jnp.eye(kept.shape[-1])
    if shrink and basis is not None:
        lost = jnp.where(trace > 0, jnp.clip(behind, 0.0, jnp.maximum(least_eigenvalue(ridged) - ridge, 0.0)), 0.0)
    rows = cholesky(ridged - lost[..., None, None] * jnp.eye(kept.shape[-1])).mT
    rows = rows if basis is None else matmul(rows, basis.mT)
    return jnp.where(trace[..., None, None] > 0, rows, 0.0), lost
