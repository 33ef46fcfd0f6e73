"""Bases of transform coding: principal directions of calibrated keys and values, and the bits that each is worth."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.attention.spec import AttentionSpec
from lowrank_kv_jax.codecs.widths import Widths, with_restored_widths, with_saved_widths
from lowrank_kv_jax.estimators.bit_allocation import steps_of
from lowrank_kv_jax.estimators.host_eigh import host_eigh
from lowrank_kv_jax.estimators.moments import Moments
from lowrank_kv_jax.storage.basis import Scaled, product_of, project
from lowrank_kv_jax.storage.directions import PRECISE, HeldDirections, in_few_bits
from lowrank_kv_jax.storage.water_filled import WidthRuns, components_of

SIDES = ("k", "v")
LEAST = 1e-5
"""Deviations below this share of a basis' largest count as much: a step must not be zero."""


class TransformBases(NamedTuple):
    """Of a group of G layers; J bases for its kv heads, W = G * (K / J) * D channels each, layer by layer.

    A token is coded as c = (x - mean) * weight @ U (see `encode`) and read as (c @ U^T) / weight + mean. Keys and values
    may share their codes (`joint`): then U stands for both, keys above values, and each side reads with its own half.

    Attributes:
        k, v: U, orthonormal `[J, W, R]`, or the halves of one that is; columns of falling variance; where components
            have bits int8, the first of them, in units of their own.
        k_coarse, v_coarse: the others, whose components have few bits, in 4 (`storage.directions`), where several layers
            share a basis: one of a single layer is small.
        k_unit, v_unit: the units of all columns in each layer `[J, G, R]`; None of floats.
        k_scale, v_scale: standard deviations `[J, R]` of c; of values None where keys have the same codes.
        k_mean, v_mean: `[G, K, D]`; None where the calibration had no sums.
        k_weight, v_weight: `[G, K, D]`; None stands for 1.
        widths: bits of the components.
    """

    k: jax.Array
    v: jax.Array
    k_coarse: jax.Array | None
    v_coarse: jax.Array | None
    k_unit: jax.Array | None
    v_unit: jax.Array | None
    k_scale: jax.Array
    v_scale: jax.Array | None
    k_mean: jax.Array | None
    v_mean: jax.Array | None
    k_weight: jax.Array | None
    v_weight: jax.Array | None
    widths: Widths

    quantised = ("k", "v", "k_coarse", "v_coarse")

    @property
    def layers(self) -> int:
        """G."""
        return self.widths.layers

    @property
    def joint(self) -> bool:
        """Whether keys and values have one code."""
        return self.v_scale is None

    @property
    def coded(self) -> tuple[tuple[str, ...], ...]:
        """What has a code of its own, each the sides that it is of."""
        return (SIDES,) if self.joint else (("k",), ("v",))

    def rank(self, side: str) -> int:
        """R of "k" or "v", however many bits its columns have."""
        held = held_directions(self, side)
        return (held.fine if held.unit is None else held.unit).shape[-1]

    def saved(self) -> dict[str, jax.Array]:
        """As arrays by name."""
        return with_saved_widths(self)

    @classmethod
    def restored(cls, arrays: dict[str, jax.Array]) -> "TransformBases":
        """What `saved` returned; units that all layers shared, as they were saved once, become each one's."""
        bases = cls(**dict.fromkeys(cls._fields) | with_restored_widths(arrays))  # type: ignore[arg-type]
        units = {name: x for name in ("k_unit", "v_unit") if (x := arrays.get(name)) is not None and x.ndim == 2}
        return bases._replace(**{name: jnp.repeat(x[:, None], bases.layers, axis=1) for name, x in units.items()})


def held_directions(bases: TransformBases, side: str) -> HeldDirections:
    """U of "k" or "v" as it is held."""
    return HeldDirections(*(getattr(bases, name) for name in names_of(side)))


def names_of(side: str) -> tuple[str, str, str]:
    """Fields of `TransformBases` that hold `HeldDirections` of "k" or "v"."""
    return side, f"{side}_coarse", f"{side}_unit"


class Side(NamedTuple):
    """Keys or values of a group's layers in a calibration; float64.

    Attributes:
        vectors: `[J, W, R]`, columns of falling variance; R = W, or twice as many where both are one code.
        variances: of them `[J, R]`.
        mean: `[G, K, D]` or None.
        weight: `[G, K, D]` or None.
    """

    vectors: np.ndarray
    variances: np.ndarray
    mean: np.ndarray | None
    weight: np.ndarray | None


def principal(
    spec: AttentionSpec, moments: Moments, tap: str, layers: tuple[int, ...], units: int, weight: np.ndarray | None = None
) -> Side:
    """Principal directions of `k`, `k_pre` or `v` of a group around their mean.

    Args:
        units: J.
        weight: what each channel is multiplied by before, `[L, K, D]` of all layers.
    """
    moment = covariance(moments, (tap, tap), layers)
    if weight is not None:
        weight = weight[list(layers)]
        moment = moment * weight.ravel()[:, None] * weight.ravel()
    values, vectors = host_eigh(blocks_of_units(moment, len(layers), units))
    return Side(vectors[..., ::-1], np.maximum(values[..., ::-1], 0.0), centre_of(spec, moments, tap, layers), weight)


def covariance(moments: Moments, taps: tuple[str, str], layers: tuple[int, ...]) -> np.ndarray:
    """Covariances `[G * W, G * W]` of one tap's channels, in rows, with another's; G layers side by side."""
    rows, columns = taps
    sums = moments.between(rows, layers) if rows == columns else moments.by_values(rows, layers)
    row, column = (moments.mean(tap)[list(layers)].ravel() for tap in taps)
    return np.asarray(sums, np.float64) / moments.tokens - np.outer(row, column)


def blocks_of_units(matrix: np.ndarray, layers: int, units: int) -> np.ndarray:
    """Blocks `[J, W, W]` of the units' own channels, layer by layer, of `[J * W, J * W]`."""
    width = len(matrix) // units
    split = matrix.reshape(2 * (layers, units, width // layers))
    return np.moveaxis(np.diagonal(split, axis1=1, axis2=4), -1, 0).reshape(units, width, width)


def centre_of(spec: AttentionSpec, moments: Moments, tap: str, layers: tuple[int, ...]) -> np.ndarray | None:
    """The mean token `[G, K, D]`; None where the calibration had no sums."""
    if getattr(moments, f"{tap}_sum") is None:
        return None
    return moments.mean(tap)[list(layers)].reshape(len(layers), spec.kv_heads, spec.head_dim)


def errors_of(sides: Sequence[Side], groups: Sequence[tuple[int, ...]], counts: float | None) -> np.ndarray:
    """What is lost without a component, `[groups, W]`, summed over the bases of a group and comparable across groups.

    Args:
        counts: see `Metric`.
    """
    errors = np.zeros((len(sides), max(side.variances.shape[-1] for side in sides)))
    for row, side, layers in zip(errors, sides, groups, strict=True):
        variances = side.variances.sum(0)
        total = variances.sum()
        scale = 1.0 if counts is None else counts * len(layers) / (total if total > 0 else 1.0)
        row[: len(variances)] = scale * variances
    return errors


def group_bases(k: Side, v: Side, widths: Widths, joint: bool = False) -> TransformBases:
    """Float32 bases of a group, with the columns that any of its profiles has bits for.

    Args:
        joint: keys and values have one code, and these are the halves of its basis.
    """
    arrays: dict[str, Any] = {}
    for name, side, index in (("k", k, 0), ("v", v, 1)):
        width = side.vectors.shape[-1]
        runs = [profile[0 if joint else index] for profile in widths.rungs]
        most = max(map(components_of, runs), default=width)
        more = ((0, 0), (0, max(most - width, 0)))  # a profile that larger groups chose, too
        deviation = np.pad(np.sqrt(side.variances), more)
        floor = np.maximum(deviation.max(-1, keepdims=True) * LEAST, np.finfo(np.float32).tiny * 1e6)
        basis = np.pad(side.vectors, ((0, 0), *more))[..., :most]
        # of several layers one direction at least: XLA's compiler for GPUs crashes on an array of none
        precise = most if widths.layers == 1 else max([1, *map(precise_of, runs)])
        arrays |= stored(name, basis, widths.layers, precise) if runs else {name: basis}
        arrays[f"{name}_scale"] = np.maximum(deviation, floor)[:, :most]
        arrays[f"{name}_mean"], arrays[f"{name}_weight"] = side.mean, side.weight
    found = {
        name: x if x is None or x.dtype == np.int8 else x.astype(np.float32) for name, x in arrays.items()
    }
    if joint:
        found["v_scale"] = None
    found = dict.fromkeys(TransformBases._fields) | jax.tree.map(jnp.asarray, found)
    return TransformBases(**found | {"widths": widths})


def precise_of(runs: WidthRuns) -> int:
    """Components whose directions have 8 bits."""
    return sum(count for bits, count in runs if bits >= PRECISE)


def stored(side: str, basis: np.ndarray, layers: int, precise: int) -> dict[str, np.ndarray | None]:
    """A basis `[J, W, R]` of "k" or "v" as `TransformBases` holds it, by name; so many columns in 8 bits."""
    return dict(zip(names_of(side), in_few_bits(basis, layers, precise), strict=True))


# ---- as they are read


def encode(
    bases: TransformBases, sides: Sequence[str], runs: WidthRuns | None, tokens: Sequence[jax.Array]
) -> jax.Array:
    """Codes `[B, J, T, R]` of tokens without their mean `[B, T, J, W]`, float32, in units of the steps where there are
    `runs`; of keys, of values, or of both at once.

    They are those of least squares in the directions as they are stored, which in few bits are no longer orthonormal: in
    8 by a hundredth, which of the largest coefficients would be more than the codes lose. One step from products with
    the directions leaves a hundredth of it. Coarse ones come after the others, of what these leave.
    """
    halves, parts = [], []
    for side, x in zip(sides, tokens, strict=True):
        basis, unit, factors = _columns(bases, side, held_directions(bases, side), runs)
        basis, columns = in_units(basis, unit), product_of(factors)
        weight = getattr(bases, f"{side}_weight")
        halves.append(basis)
        parts.append(x if weight is None else x * by_unit(weight.astype(jnp.float32), basis.shape[0]))
    basis, x = jnp.concatenate(halves, axis=1), jnp.concatenate(parts, axis=-1)
    first = getattr(bases, sides[0]).shape[-1]
    there, back = basis / columns[:, None], basis * columns[:, None]
    codes = _least_squares(there[..., :first], back[..., :first], x)
    if first >= basis.shape[-1]:
        return codes
    left = x - _read(back[..., :first], codes)
    return jnp.concatenate([codes, _least_squares(there[..., first:], back[..., first:], left)], axis=-1)


def directions_of(bases: TransformBases, side: str) -> jax.Array:
    """U of "k" or "v", which is held in few bits, as float32 `[J, W, R]`."""
    return in_units(*held_directions(bases, side).first(bases.rank(side)))


def in_units(basis: jax.Array, unit: jax.Array | None) -> jax.Array:
    """Float32 of `[J, W, R]` in units of each column in each layer `[J, G, R]`; None: of 1."""
    basis = basis.astype(jnp.float32)
    if unit is None:
        return basis
    split = basis.reshape(*unit.shape[:2], -1, unit.shape[2]) * unit.astype(jnp.float32)[:, :, None]
    return split.reshape(basis.shape)


def _least_squares(there: jax.Array, back: jax.Array, x: jax.Array) -> jax.Array:
    """Codes of tokens in columns that are next to orthonormal, but for what they are multiplied by."""
    return project(there, 2 * x - _read(back, project(there, x)))  # of x, and of what its codes leave of it


def _read(back: jax.Array, codes: jax.Array) -> jax.Array:
    return project(back.swapaxes(-1, -2), codes.swapaxes(1, 2)).swapaxes(1, 2)


def decoder(bases: TransformBases, side: str, runs: WidthRuns | None, layer: int | jax.Array) -> Scaled:
    """What takes a code to a token of that layer of the group, its transpose to the right, `[J, (K / J) * D, R]`."""
    own = held_directions(bases, side).of_layer(bases.layers, layer)
    directions, unit, factors = _columns(bases, side, own, runs)
    weight = getattr(bases, f"{side}_weight")
    weights = None if weight is None else weight[layer].reshape(directions.shape[0], -1)
    return Scaled(directions, weights, factors if unit is None else (*factors, unit[:, 0]))


def by_unit(x: jax.Array, units: int) -> jax.Array:
    """`[..., J, W]` of `[..., G, K, D]`: the channels of a unit's heads, layer by layer."""
    split = x.reshape(*x.shape[:-2], units, -1)
    return split.swapaxes(-3, -2).reshape(*x.shape[:-3], units, -1)


def _columns(
    bases: TransformBases, side: str, held: HeldDirections, runs: WidthRuns | None
) -> tuple[jax.Array, jax.Array | None, tuple[jax.Array, ...]]:
    """Columns of U that have bits, their units (`HeldDirections.first`), and factors of what they are multiplied by then,
    `[J, R]` and `[R]`: the steps."""
    if runs is None:
        return held.fine, None, (jnp.ones((held.fine.shape[0], held.fine.shape[-1]), jnp.float32),)
    count, scale = components_of(runs), getattr(bases, f"{side}_scale")
    scale = bases.k_scale if scale is None else scale
    return *held.first(count), (scale[:, :count], jnp.asarray(steps_of(runs), jnp.float32))
