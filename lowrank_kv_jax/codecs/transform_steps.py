"""Steps of each row: those of the bases, by how much its prompt deviates more or less than the calibration's text."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.attention.spec import Taps
from lowrank_kv_jax.codecs.frame import Frame
from lowrank_kv_jax.codecs.transform_bases import TransformBases
from lowrank_kv_jax.codecs.transform_store import PRIOR, Transformed, coefficients
from lowrank_kv_jax.estimators.bit_allocation import steps_of
from lowrank_kv_jax.storage.water_filled import WIDTHS, WidthRuns

LEAST, MOST = 0.25, 4.0
"""Steps of a row, in units of the calibrated ones, lie between: a prompt of one repeated token deviates by nothing."""
FAR = 1e9
"""Deviations beyond count as so many: of a component that the calibration hardly saw, the square would overflow."""


def with_steps_of(
    bases: TransformBases, store: Transformed, taps: tuple[Taps, ...], keys: str, weight: jax.Array
) -> Transformed:
    """An empty store with the steps of a prompt, which are rounded before anything is coded in them.

    Of each component the root of the prompt's mean square in units of the calibrated variance, which counts as `PRIOR`
    tokens do. Components in 8 bits keep theirs: they have to reach the few tokens that act as sinks, however little the
    others deviate. A store without steps of its own stays as it is.

    Args:
        store: with the means that its tokens are coded around.
        taps: of each layer.
        keys: the tap that is coded as keys.
        weight: float32 `[B, T]`, 1 for the tokens that count.
    """
    if store.profile is None or store.k_step is None:
        return store

    def steps(side: str, name: str, runs: WidthRuns) -> jax.Array:
        found = coefficients(bases, store, side, [getattr(tap, name) for tap in taps])
        deviations = jnp.clip(found * jnp.asarray(steps_of(runs), jnp.float32), -FAR, FAR)
        squares = jnp.einsum("bt,bjtr->bjr", weight, deviations**2)
        own = jnp.sqrt((PRIOR + squares) / (PRIOR + weight.sum(1)[:, None, None]))
        return jnp.where(_bits_of(runs) == WIDTHS[0], 1.0, jnp.clip(own, LEAST, MOST)).astype(dtype)

    dtype, (k_runs, v_runs) = store.k_step.dtype, store.profile
    return dataclasses.replace(store, k_step=steps("k", keys, k_runs), v_step=steps("v", "v", v_runs))


def by_steps(x: jax.Array, step: jax.Array | None) -> jax.Array:
    """Folded queries or attended codes `[B, T, N, R]`, times the steps `[B, J, R]` of the head of each, if any."""
    if step is None:
        return x
    return x * jnp.repeat(step.astype(x.dtype), x.shape[2] // step.shape[1], axis=1)[:, None]


def of_each_row(frame: Frame, store: Transformed) -> Frame:
    """A frame to rebuild tokens in, its bases `[B, J, W, R]` where rows have steps of their own."""
    def own(basis: jax.Array, step: jax.Array | None) -> jax.Array:
        return basis if step is None else basis * step.astype(basis.dtype)[:, :, None]

    return frame._replace(k=own(frame.k, store.k_step), v=own(frame.v, store.v_step))


def _bits_of(runs: WidthRuns) -> np.ndarray:
    """Of each component `[R]`."""
    return np.concatenate([np.full(count, bits) for bits, count in runs])
