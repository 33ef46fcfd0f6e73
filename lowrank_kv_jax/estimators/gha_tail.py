"""StreamingKV's update: the Generalised Hebbian Algorithm on the last columns of a basis, the others at rest."""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Float32

from lowrank_kv_jax.estimators.estimator import batch_moment, check_batch
from lowrank_kv_jax.storage.precise import matmul

TRIANGLES = ("sanger", "printed", "full")
STEP_SCALES = ("bound", "mean", "sum")
LARGEST_NORM = 1e3
"""Norm of a column beyond which an update has diverged: the rule's own fixed points have norm 1."""


def update_tail(
    lead: Float[jax.Array, "... W rest"], tail: Float[jax.Array, "*lead W p"], x: Float[jax.Array, "... T W"],
    weight: Float[jax.Array, "..."] | None, eta: float, *, iterations: int = 1, triangle: str = "sanger",
    scale: str = "bound", frozen_outputs: bool = False,
) -> Float32[jax.Array, "*lead W p"]:
    """`gha_update` of A = [lead | tail] with tail=p, without ever forming what belongs to the columns at rest.

    With fixed leading columns Sanger's deflation by them is taken once: the step of the tail is
    X'^T H - A_tail triu(H^T H), where H = X A_tail and X' = X - X A_lead A_lead^T. An iteration costs 2 W p numbers a
    token, or W^2 p where there are more tokens than channels (then second moments stand for them), not W R.

    Args:
        lead: columns at rest `[..., W, R - p]`.
        tail: columns that move `[..., W, p]`.
        x: tokens `[..., T, W]`.
        weight: broadcasts to `[..., T]`; 0 leaves a token out, None means 1.
        eta: step size.
        iterations: steps on the same tokens.
        triangle: "sanger" (Algorithm 1), "printed" (equation 15 as it stands: the other triangle, which does not
            deflate by the leading columns) or "full" (no triangle: a subspace rule, table 3 of the paper).
        scale: what the step is divided by: "bound", the largest absolute row sum of H^T H, an upper bound of its
            largest eigenvalue that makes eta <= 1 stable whatever the size of the activations; "mean", the total
            weight; "sum", 1 (Algorithm 1).
        frozen_outputs: compute H once, before the iterations, as Algorithm 1 does.

    Returns:
        float32 `[..., W, p]`, not orthonormalised; NaN where the update diverged (see `LARGEST_NORM`), never a finite
        wrong one.
    """
    for field, value, allowed in (("triangle", triangle, TRIANGLES), ("scale", scale, STEP_SCALES)):
        if value not in allowed:
            raise ValueError(f"{field}={value!r}: allowed are {', '.join(allowed)}")
    x, weight = check_batch(x, weight)
    lead, a = lead.astype(jnp.float32), tail.astype(jnp.float32)
    corner = {"sanger": jnp.triu, "printed": jnp.tril, "full": lambda inner: inner}[triangle]
    deflated = triangle != "printed"
    if x.shape[-2] > x.shape[-1]:
        moment = batch_moment(x, weight)
        source = moment - matmul(lead, matmul(lead.mT, moment)) if deflated else moment

        def outputs(a):
            return matmul(source, a), matmul(a.mT, matmul(moment, a))
    else:
        source = x - matmul(matmul(x, lead), lead.mT) if deflated else x

        def outputs(a):
            h = matmul(x, a)
            weighted = h * weight[..., None]
            return matmul(source.mT, weighted), matmul(h.mT, weighted)

    total = jnp.sum(weight, axis=-1)
    image, inner = outputs(a)
    for step in range(iterations):
        if step and not frozen_outputs:
            image, inner = outputs(a)
        a = a + eta * (image - matmul(a, corner(inner))) / _divisor(inner, total, scale)
    norms = jnp.linalg.norm(a, axis=-2)
    broke = ~jnp.all(norms <= LARGEST_NORM, axis=-1)  # NaN compares false
    return jnp.where(broke[..., None, None], jnp.nan, a)


def _divisor(inner: jax.Array, total: jax.Array, scale: str) -> jax.Array:
    tiny = jnp.finfo(jnp.float32).tiny
    if scale == "bound":
        return jnp.maximum(jnp.max(jnp.sum(jnp.abs(inner), axis=-1), axis=-1), tiny)[..., None, None]
    if scale == "mean":
        return jnp.maximum(total, tiny)[..., None, None]
    return jnp.ones((), jnp.float32)
