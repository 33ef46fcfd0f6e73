"""The Generalised Hebbian Algorithm (Sanger, 1989; StreamingKV, section 4.2 and Algorithm 1), in batch form."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Float, Float32

from lowrank_kv_jax.checks.bounds import check_int, check_kind, check_number
from lowrank_kv_jax.estimators.estimator import SizedEstimator, batch_moment, check_batch, register_estimator
from lowrank_kv_jax.estimators.linalg import orthonormalise
from lowrank_kv_jax.estimators.svd import principal_subspace, spectrum
from lowrank_kv_jax.storage.precise import matmul
from lowrank_kv_jax.storage.state import leaf, state

ORIENTATIONS = ("sanger", "printed")
SCALES = ("largest", "mean", "sum")
MOST_ITERATIONS = 1000  # they are unrolled in the program


def gha_update(
    basis: Float[jax.Array, "*lead W R"], x: Float[jax.Array, "*lead T W"], weight: Float[jax.Array, "..."] | None,
    eta: float, *, tail: int | None = None, iterations: int = 1, orientation: str = "sanger", scale: str = "largest",
    frozen_outputs: bool = False,
) -> Float32[jax.Array, "*lead W R"]:
    """Steps A <- A + eta [x h^T - A triu(h h^T)] with h = A^T x, summed over the tokens of a batch.

    The columns converge to the principal directions in order, each kept apart from those before it; columns are
    normalised by the rule itself, not by a QR. With A `[W, R]` the triangle is the *upper* one (Sanger's rule, and the
    row form of StreamingKV's Algorithm 1). Equation 15 prints tril(h h^T), which recovers the directions in reverse
    order: the last column leads, and the tail columns that StreamingKV updates would be the strongest.

    Args:
        basis: A, `[..., W, R]`.
        x: tokens `[..., T, W]`.
        weight: broadcasts to `[..., T]`; None means 1.
        eta: step size; with scale="largest" stable below 1.
        tail: update only so many last columns (p = floor(alpha r) in the paper); None updates all.
        iterations: steps on the same batch.
        orientation: "sanger" or "printed".
        scale: what the batch's step is divided by: the "largest" eigenvalue of sum w h h^T (its second moment within
            the basis; makes eta independent of the activations' size), the total weight ("mean"), or 1 ("sum",
            Algorithm 1).
        frozen_outputs: compute h once, before the iterations, as Algorithm 1 does.

    Returns:
        float32 `[..., W, R]`, not orthonormalised.

    Raises:
        ValueError: an unknown orientation or scale, or a tail outside of 0..R.
    """
    if orientation not in ORIENTATIONS:
        raise ValueError(f"orientation={orientation!r}: allowed are {', '.join(ORIENTATIONS)}")
    if scale not in SCALES:
        raise ValueError(f"scale={scale!r}: allowed are {', '.join(SCALES)}")
    rank = basis.shape[-1]
    tail = rank if tail is None else tail
    if not 0 <= tail <= rank:
        raise ValueError(f"tail={tail}: must lie in 0..{rank}, the columns of the basis")
    x, weight = check_batch(x, weight)
    a = basis.astype(jnp.float32)
    triangle = jnp.triu if orientation == "sanger" else jnp.tril
    moment = batch_moment(x, weight)

    def outputs(a):
        image = matmul(moment, a)  # sum of w x h^T
        return image, matmul(a.mT, image)  # and of w h h^T

    image, inner = outputs(a)
    for step in range(iterations):
        if step and not frozen_outputs:
            image, inner = outputs(a)
        move = image - matmul(a, triangle(inner))
        move = move / _scale(inner, weight, scale)
        a = a.at[..., rank - tail :].add(eta * move[..., rank - tail :])
    return a


def _scale(inner: jax.Array, weight: jax.Array, scale: str) -> jax.Array:
    tiny = jnp.finfo(jnp.float32).tiny
    if scale == "largest":
        inner = (inner + inner.mT) / 2
        return jnp.maximum(spectrum(inner)[..., -1], tiny)[..., None, None]
    if scale == "mean":
        return jnp.maximum(jnp.sum(weight, axis=-1), tiny)[..., None, None]
    return jnp.ones((), jnp.float32)


@state
class Hebbian:
    """The columns A, float32 `[B, J, W, R]`, nearly orthonormal."""

    columns: jax.Array = leaf("batch", "kv_heads", "width", "rank", kind="moments")


@register_estimator("gha")
@dataclasses.dataclass(frozen=True)
class GHA(SizedEstimator):
    """Columns moved by `gha_update`. W R numbers are kept; an update costs T W^2 + W^2 R multiplications and, with
    scale="largest", the eigenvalues of an R x R matrix. No decomposition of W x W.

    Attributes:
        size: R, columns.
        eta, tail, iterations, orientation, scale: see `gha_update`.
        reset: orthonormalise after each update (StreamingKV, A.6, does so every five steps); False leaves it to the
            rule, and `basis` orthonormalises what it returns.
    """

    eta: float = 0.5
    tail: int | None = None
    iterations: int = 10
    orientation: str = "sanger"
    scale: str = "largest"
    reset: bool = False

    def __post_init__(self):
        super().__post_init__()
        check_kind("eta", self.eta, (float,))
        check_number("eta", self.eta, 0)
        if self.tail is not None:
            check_int("tail", self.tail, 0, self.size)
        check_int("iterations", self.iterations, 1, MOST_ITERATIONS)
        for field, allowed in (("orientation", ORIENTATIONS), ("scale", SCALES)):
            if getattr(self, field) not in allowed:
                raise ValueError(f"{field}={getattr(self, field)!r}: allowed are {', '.join(allowed)}")
        check_kind("reset", self.reset, (bool,))

    def init(self, lead, width, start=None):
        return Hebbian(start_columns(lead, width, self.size, start))

    def update(self, learned, x, weight=None):
        columns = gha_update(
            learned.columns, x, weight, self.eta, tail=self.tail, iterations=self.iterations,
            orientation=self.orientation, scale=self.scale,
        )
        return Hebbian(orthonormalise(columns) if self.reset else columns)

    def basis(self, learned, rank):
        self.check_rank(rank, learned.columns.shape[-2])
        columns = learned.columns[..., ::-1] if self.orientation == "printed" else learned.columns
        return orthonormalise(columns[..., :rank])


def start_columns(
    lead: tuple[int, ...], width: int, size: int, start: Float[jax.Array, "... W R"] | None
) -> Float32[jax.Array, "*lead W size"]:
    """Orthonormal `[*lead, W, min(size, W)]` that begins with the columns of `start`, filled up orthogonally to them."""
    size = min(size, width)
    eye = jnp.eye(width, dtype=jnp.float32)
    if start is None:
        return jnp.broadcast_to(eye[:, :size], (*lead, width, size))
    start = jnp.broadcast_to(start, (*lead, *start.shape[-2:])).astype(jnp.float32)[..., :size]
    if start.shape[-1] == size:
        return start
    rest = principal_subspace(eye - matmul(start, start.mT), size - start.shape[-1])
    return jnp.concatenate([start, rest], axis=-1)
