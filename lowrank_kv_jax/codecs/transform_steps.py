"""Steps of each row: those of the bases, by how much its prompt deviates more or less than the calibration's text."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from lowrank_kv_jax.attention.spec import Taps
from lowrank_kv_jax.codecs.frame import Frame
from lowrank_kv_jax.codecs.transform_bases import TransformBases
from lowrank_kv_jax.codecs.transform_store import KeysOf, Transformed, coefficients
from lowrank_kv_jax.estimators.bit_allocation import steps_of
from lowrank_kv_jax.estimators.row_steps import own_ratios


def with_steps_of(
    bases: TransformBases, store: Transformed, taps: tuple[Taps, ...], keys: KeysOf, weight: jax.Array
) -> Transformed:
    """An empty store with the steps of a prompt, which are rounded before anything is coded in them.

    A store without steps of its own stays as it is.

    Args:
        store: with the means that its tokens are coded around.
        taps: of each layer.
        keys: what is coded as keys.
        weight: float32 `[B, T]`, 1 for the tokens that count.
    """
    if store.profile is None or store.k_step is None:
        return store

    dtype, profile, found = store.k_step.dtype, store.profile, {}
    for codes, runs in zip(coefficients(bases, store, taps, keys), profile, strict=False):
        ratios = own_ratios(codes * jnp.asarray(steps_of(runs), jnp.float32), weight, runs)
        found[("k_step", "v_step")[len(found)]] = ratios.astype(dtype)
    return dataclasses.replace(store, **found)


def of_each_row(frame: Frame, store: Transformed) -> Frame:
    """The frame that codes are read in, its bases `[B, J, W, R]` where rows have steps of their own."""
    def own(basis: Any, step: jax.Array | None) -> Any:
        return basis if step is None else basis._replace(factors=(*basis.factors, step))

    of_values = store.k_step if store.v_step is None else store.v_step  # of one code there is one step
    return frame._replace(k=own(frame.k, store.k_step), v=own(frame.v, of_values))
