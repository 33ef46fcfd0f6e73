"""Matrix factorisations of small batches that cannot hang a CPU."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Float, Float32

from lowrank_kv_jax.storage.backend import platform
from lowrank_kv_jax.storage.precise import gram, matmul

SQUARINGS = 8
"""Of a matrix, until the largest eigenvalue outweighs the others."""
ROOT_STEPS = 22
"""Of `inverse_root`: each brings a small eigenvalue 2.25 times nearer to the others."""


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
    if count == 1 or platform() != "cpu" or jax.device_count() > 1:
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


def largest_eigenvalue(matrix: Float[jax.Array, "*lead W W"]) -> Float32[jax.Array, "*lead"]:
    """Of symmetric positive semidefinite `[..., W, W]`, float32 `[...]`, at most 2% too low.

    tr(M P) / tr(P) with P = M^256, by squaring: matrix products alone, where a decomposition is a serial call for each
    matrix on a GPU. It is exact where the largest stands apart, or all are alike.
    """
    matrix = matrix.astype(jnp.float32)
    power = matrix
    for _ in range(SQUARINGS):
        power = power / _trace_or_one(power)
        power = matmul(power, power)
    image = jnp.sum(matrix * power, axis=(-2, -1))
    return image / _trace_or_one(power)[..., 0, 0]


def least_eigenvalue(matrix: Float[jax.Array, "*lead W W"]) -> Float32[jax.Array, "*lead"]:
    """Of symmetric positive definite `[..., W, W]`, float32 `[...]`, never too high, and at most ln(W) / 256 too low.

    tr(M^-256)^(-1/256), by squaring the inverse: no eigenvalue of M^-1 is above that trace's root.
    """
    power = divide_right(jnp.broadcast_to(jnp.eye(matrix.shape[-1]), matrix.shape), matrix)
    log = jnp.zeros(matrix.shape[:-2])
    for squared in range(SQUARINGS):
        trace = _trace_or_one(power)
        log, power = log + jnp.log(trace[..., 0, 0]) / 2**squared, power / trace
        power = matmul(power, power)
    return jnp.exp(-log - jnp.log(_trace_or_one(power)[..., 0, 0]) / 2**SQUARINGS)


def _trace_or_one(x: jax.Array) -> jax.Array:
    trace = jnp.trace(x, axis1=-2, axis2=-1)[..., None, None]
    return jnp.where(trace > 0, trace, 1.0)


def orthonormalise(basis: Float[jax.Array, "*lead W R"], passes: int = 3) -> Float32[jax.Array, "*lead W R"]:
    """Orthonormal columns of the same nested spans as those of `basis` `[..., W, R]`, by shifted Cholesky QRs.

    The triangular factor has a positive diagonal. All of it is matrix products and R x R factorisations, where
    Householder's QR is twenty times slower on a CPU and a serial call for each matrix on a GPU. Columns may differ in
    scale; where they are dependent to the last bits of float32, what completes the basis is arbitrary, and it takes five
    `passes`. Fewer than three only bound the condition of the result.
    """
    x, eye = basis.astype(jnp.float32), jnp.eye(basis.shape[-1], dtype=jnp.float32)
    shifts = (*(passes - 1) * [1e-7], 1e-7 if passes < 3 else 1e-8)  # of the Gram matrix' norm: more than float32 errs by
    for shift in shifts:
        norm = jnp.linalg.norm(x, axis=-2, keepdims=True)
        x = x / jnp.where(norm == 0, 1.0, norm)
        square = gram(x)
        shift = shift * jnp.linalg.norm(square, axis=(-2, -1), keepdims=True)
        x = one_by_one(_solve_right, cholesky(square + shift * eye), x)
    return x


def orthonormal_update(
    basis: Float[jax.Array, "*lead W R"], a: Float[jax.Array, "*lead W T"], b: Float[jax.Array, "*lead R T"]
) -> Float32[jax.Array, "*lead W R"]:
    """The orthonormal columns nearest to those of V = U + A B^T, of an orthonormal U: V (V^T V)^(-1/2).

    V^T V - I lies in the span P of [B, U^T A], so that the root is one of a 2 T x 2 T matrix: V (I + P (M - I) P^T) with
    M = (P^T V^T V P)^(-1/2). Two Newton-Schulz steps make it orthonormal to the last bits.
    """
    u, a, b = (x.astype(jnp.float32) for x in (basis, a, b))
    span = orthonormalise(jnp.concatenate([b, matmul(u.mT, a)], axis=-1), passes=5)  # both may hold the same directions
    moved = u + matmul(a, b.mT)
    inside, eye = matmul(moved, span), jnp.eye(span.shape[-1])
    nothing = eye - gram(span)  # where columns of zeros have added no direction
    root = inverse_root(gram(inside) + nothing)
    return polish(polish(moved + matmul(matmul(inside, root - eye), span.mT)))


def inverse_root(matrix: Float[jax.Array, "*lead W W"]) -> Float32[jax.Array, "*lead W W"]:
    """M^(-1/2) of symmetric positive definite M of a condition up to about 1e6, by products alone.

    Newton and Schulz's coupled iteration (Higham, Functions of Matrices, equation 6.35).
    """
    matrix, eye = matrix.astype(jnp.float32), jnp.eye(matrix.shape[-1])
    norm = jnp.linalg.norm(matrix, axis=(-2, -1), keepdims=True)

    def step(_, pair):
        root, inverse = pair
        change = 1.5 * eye - 0.5 * matmul(inverse, root)
        return matmul(root, change), matmul(change, inverse)

    start = matrix / norm, jnp.broadcast_to(eye, matrix.shape)
    return jax.lax.fori_loop(0, ROOT_STEPS, step, start)[1] / jnp.sqrt(norm)


def polish(basis: Float[jax.Array, "*lead W R"]) -> Float[jax.Array, "*lead W R"]:
    """Nearly orthonormal columns `[..., W, R]` made orthonormal to the last bits by one Newton-Schulz step.

    LAPACK's float32 eigenvectors are off by some dozen units in the last place, which every token coded in them bears.
    """
    excess = gram(basis) - jnp.eye(basis.shape[-1], dtype=basis.dtype)
    return basis - matmul(basis, excess / 2)


def divide_right(
    x: Float[jax.Array, "*lead W R"], matrix: Float[jax.Array, "*lead R R"]
) -> Float32[jax.Array, "*lead W R"]:
    """X M^-1 of symmetric positive definite M, in float32."""
    factor, x = cholesky(matrix.astype(jnp.float32)), x.astype(jnp.float32)
    return one_by_one(_solve_left, factor, one_by_one(_solve_right, factor, x))


def _solve_left(factor: jax.Array, x: jax.Array) -> jax.Array:
    """X L^-1."""
    return jax.lax.linalg.triangular_solve(factor, x, left_side=False, lower=True)


def _solve_right(factor: jax.Array, x: jax.Array) -> jax.Array:
    """X L^-T."""
    return jax.lax.linalg.triangular_solve(factor, x, left_side=False, lower=True, transpose_a=True)
