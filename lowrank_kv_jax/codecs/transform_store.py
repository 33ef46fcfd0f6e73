"""What transform coding holds of a group's tokens: codes, and what each row's are coded around and in which steps."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lowrank_kv_jax.attention.rope import rotate
from lowrank_kv_jax.attention.spec import Taps
from lowrank_kv_jax.codecs.transform_bases import SIDES, TransformBases, by_unit, encode
from lowrank_kv_jax.estimators.bit_allocation import Profile
from lowrank_kv_jax.estimators.row_steps import PRIOR
from lowrank_kv_jax.method.codec import Tokens
from lowrank_kv_jax.method.layout import Layout
from lowrank_kv_jax.segments import coded as coded_tokens
from lowrank_kv_jax.storage import precise
from lowrank_kv_jax.storage.cache_dtype import narrow
from lowrank_kv_jax.storage.positions import PerHead
from lowrank_kv_jax.storage.state import leaf, state, static
from lowrank_kv_jax.storage.water_filled import WidthRuns, components_of, empty_water_filled


class KeysOf(NamedTuple):
    """Which keys of a token are coded.

    Attributes:
        tap: by name.
        angles: cos and sin that they are turned by once their mean is off, float32 `[B or 1, T, 1, 1, half]`, or None.
    """

    tap: str
    angles: tuple[jax.Array, jax.Array] | None = None


@state
class Transformed:
    """Codes of a group's tokens, which all of its layers share.

    Attributes:
        tokens: the codes; values have no channels where keys and values are one code, which is held as that of the keys.
        k_mean, v_mean: of each row's prompt `[B, G, K, D]`; None where the calibration's are read.
        k_step, v_step: of each row's components `[B, J, R]`, in units of the calibrated steps; None where these are read,
            of floats, and of values that have the codes of keys.
        profile: widths of keys and values, also of pages that were taken alone and are widened; None of floats. Those of
            values are empty where keys have their codes.
    """

    tokens: coded_tokens.Coded
    k_mean: jax.Array | None = leaf("batch", None, "kv_heads", "head_dim", kind="bases")
    v_mean: jax.Array | None = leaf("batch", None, "kv_heads", "head_dim", kind="bases")
    k_step: jax.Array | None = leaf("batch", "kv_heads", "rank", kind="bases")
    v_step: jax.Array | None = leaf("batch", "kv_heads", "rank", kind="bases")
    profile: Profile | None = static()


def empty_store(
    layout: Layout, bases: TransformBases, heads: int, size: int, positions: PerHead | None, own_means: bool,
    own_steps: bool,
) -> Transformed:
    """Room for `size` tokens of each of so many heads; means and steps of its own, if any, begin as the calibration's."""
    profile = bases.widths.rungs[0] if bases.widths.rungs else None

    def side(index: int) -> Any:
        shared = index >= len(bases.coded)
        if profile is None or shared:
            shape = (layout.batch, heads, size, 0 if shared else getattr(bases, SIDES[index]).shape[-1])
            return jnp.zeros(shape, jnp.dtype(layout.dtype))
        return empty_water_filled(layout.batch, heads, size, profile[index])

    def mean(of_bases: jax.Array | None) -> jax.Array | None:
        if not own_means:
            return None
        shape = (layout.batch, bases.layers, layout.spec.kv_heads, layout.spec.head_dim)
        return narrow(jnp.broadcast_to(jnp.zeros(()) if of_bases is None else of_bases, shape), layout.dtype)

    def step(index: int) -> jax.Array | None:
        if profile is None or not own_steps or index >= len(bases.coded):
            return None
        return jnp.ones((layout.batch, bases.k.shape[0], components_of(profile[index])), layout.dtype)

    tokens = coded_tokens.without_tokens(side(0), side(1), positions)
    return Transformed(tokens, mean(bases.k_mean), mean(bases.v_mean), step(0), step(1), profile)


def with_means_of(store: Transformed, taps: tuple[Taps, ...], keys: str, weight: jax.Array) -> Transformed:
    """An empty store with the means of a prompt, which are rounded before anything is coded around them.

    Args:
        taps: of each layer.
        keys: the tap that is coded as keys.
        weight: float32 `[B, T]`, 1 for the tokens that count.
    """
    total = PRIOR + weight.sum(1)[:, None, None, None]

    def mean(known: jax.Array, name: str) -> jax.Array:
        sums = [precise.einsum("bt,btkd->bkd", weight, getattr(tap, name).astype(jnp.float32)) for tap in taps]
        return narrow((PRIOR * known.astype(jnp.float32) + jnp.stack(sums, axis=1)) / total, known.dtype)

    return dataclasses.replace(store, k_mean=mean(store.k_mean, keys), v_mean=mean(store.v_mean, "v"))


def means_in(bases: TransformBases, store: Transformed, side: str) -> jax.Array | None:
    """What tokens are coded around, `[G, K, D]` or of each row `[B, G, K, D]`; None is zero."""
    own = getattr(store, f"{side}_mean")
    return getattr(bases, f"{side}_mean") if own is None else own


def coefficients(
    bases: TransformBases, store: Transformed, tokens: tuple[Taps, ...] | tuple[Tokens, ...], keys: KeysOf
) -> list[jax.Array]:
    """Of each of `TransformBases.coded`: float32 `[B, J, T, R]`, in units of the calibrated steps.

    Args:
        tokens: of each layer, `[B, T, ...]`.
        keys: what is coded as keys.
    """
    def centred(side: str) -> jax.Array:
        layers = [getattr(one, keys.tap if side == "k" else side) for one in tokens]
        x, mean = jnp.stack(layers, axis=2).astype(jnp.float32), means_in(bases, store, side)
        if mean is not None:
            x = x - (mean if mean.ndim == 3 else mean[:, None]).astype(x.dtype)
        if side == "k" and keys.angles is not None:
            x = rotate(x, *keys.angles)
        return by_unit(x, getattr(bases, side).shape[0])

    return [encode(bases, sides, runs_in(store, sides[0]), [centred(side) for side in sides]) for sides in bases.coded]


def runs_in(store: Transformed, side: str) -> WidthRuns | None:
    """Widths of the codes that keys or values are read from; None of floats."""
    if store.profile is None:
        return None
    return store.profile[SIDES.index(side)] or store.profile[0]
