"""Steps of each row, of what its prompt shows and a calibration knows."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float32

from lowrank_kv_jax.estimators.bit_allocation import steps_of
from lowrank_kv_jax.storage import precise
from lowrank_kv_jax.storage.cache_dtype import narrow
from lowrank_kv_jax.storage.steps import Steps
from lowrank_kv_jax.storage.water_filled import WIDTHS, WidthRuns

PRIOR = 32
"""Tokens that the calibration's means and variances count for beside a prompt's: a short one has no good ones itself."""
LEAST, MOST = 0.25, 4.0
"""Steps of a row, in units of the calibrated ones, lie between: a prompt of one repeated token deviates by nothing."""
FAR = 1e9
"""Deviations beyond count as so many: of a component that the calibration hardly saw, the square would overflow."""
FLAT = 1e-5
"""Deviations of a prompt below this share of its largest count as much, where no calibration knows better."""


def own_ratios(
    deviations: Float[jax.Array, "B J T R"], weight: Float[jax.Array, "B T"], runs: WidthRuns
) -> Float32[jax.Array, "B J R"]:
    """Steps of each row in units of the calibrated ones `[B, J, R]`.

    Of each component the root of the row's mean square, which the calibrated one joins as `PRIOR` tokens. Components in 8
    bits keep theirs: they have to reach the few tokens that act as sinks, however little the others deviate.

    Args:
        deviations: of tokens, in units of the calibrated standard deviations.
        weight: 1 for the tokens that count.
    """
    squares = precise.einsum("bt,bjtr->bjr", weight, jnp.clip(deviations, -FAR, FAR) ** 2)
    own = jnp.sqrt((PRIOR + squares) / (PRIOR + weight.sum(1)[:, None, None]))
    return jnp.where(_bits_of(runs) == WIDTHS[0], 1.0, jnp.clip(own, LEAST, MOST))


def calibrated_steps(
    scale: Float[jax.Array, "J R"], zero: Float[jax.Array, "J R"], runs: WidthRuns, batch: int, dtype
) -> Steps:
    """Those of calibrated deviations and means, for each row."""
    step = scale.astype(jnp.float32) * jnp.asarray(steps_of(runs), jnp.float32)
    return Steps(*(jnp.broadcast_to(x, (batch, *x.shape)) for x in (_above_zero(step, dtype), narrow(zero, dtype))))


def drawn_steps(
    x: Float[jax.Array, "B J T R"], weight: Float[jax.Array, "B T"], scale: Float[jax.Array, "J R"],
    zero: Float[jax.Array, "J R"], runs: WidthRuns, dtype,
) -> Steps:
    """Those of a prompt's coefficients, drawn towards the calibrated ones (`own_ratios`), rounded to `dtype`.

    Args:
        weight: 1 for the tokens that count.
        scale, zero: calibrated standard deviations and means.
    """
    scale = scale.astype(jnp.float32)
    total = PRIOR + weight.sum(1)[:, None, None]
    around = narrow((PRIOR * zero.astype(jnp.float32) + precise.einsum("bt,bjtr->bjr", weight, x)) / total, dtype)
    deviations = (x - around.astype(jnp.float32)[:, :, None]) / scale[:, None]
    ratio = own_ratios(deviations, weight, runs)
    return Steps(_above_zero(ratio * scale * jnp.asarray(steps_of(runs), jnp.float32), dtype), around)


def fitted_steps(
    x: Float[jax.Array, "B J T R"], weight: Float[jax.Array, "B T"], runs: WidthRuns, dtype
) -> Steps:
    """Those of a prompt's coefficients alone, rounded to `dtype`; 1 and 0 of a row without tokens."""
    count = jnp.maximum(weight.sum(1), 1)[:, None, None]
    around = narrow(precise.einsum("bt,bjtr->bjr", weight, x) / count, dtype)
    squares = precise.einsum("bt,bjtr->bjr", weight, (x - around.astype(jnp.float32)[:, :, None]) ** 2)
    deviation = jnp.sqrt(squares / count)
    most = jnp.max(deviation, axis=-1, keepdims=True)
    deviation = jnp.where(most > 0, jnp.maximum(deviation, FLAT * most), 1.0)
    return Steps(_above_zero(deviation * jnp.asarray(steps_of(runs), jnp.float32), dtype), around)


def _above_zero(step: jax.Array, dtype) -> jax.Array:
    return narrow(jnp.maximum(step, float(jnp.finfo(dtype).tiny)), dtype)


def _bits_of(runs: WidthRuns) -> np.ndarray:
    """Of each component `[R]`."""
    return np.concatenate([np.full(count, bits) for bits, count in runs])
