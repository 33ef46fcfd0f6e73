"""Bases of transform coding: principal directions of calibrated keys and values, and the bits that each is worth."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.attention.spec import AttentionSpec
from lowrank_kv_jax.estimators.bit_allocation import Profile, steps_of
from lowrank_kv_jax.estimators.moments import Moments, head_blocks
from lowrank_kv_jax.storage.state import state, static
from lowrank_kv_jax.storage.water_filled import WIDTHS, WidthRuns, bytes_of, components_of

LEAST = 1e-5
"""Deviations below this share of a basis' largest count as much: a step must not be zero."""


@state
class Widths:
    """Numbers of the tree structure, so that layers of one profile share their programs.

    Attributes:
        rungs: profiles of this layer, the most bits first; one, but where bytes decide. None: components are floats.
        mean: bytes of a token of each rung, keys and values, of all layers on average, rounded up.
    """

    rungs: tuple[Profile, ...] = static()
    mean: tuple[tuple[int, int], ...] = static()


class TransformBases(NamedTuple):
    """Of one layer; J bases for its kv heads, W = (K / J) * D channels each.

    A token is coded as c = (x - mean) * weight @ U and read as (c @ U^T) / weight + mean.

    Attributes:
        k, v: U, orthonormal `[J, W, R]`, columns of falling variance.
        k_scale, v_scale: standard deviations `[J, R]` of c.
        k_mean, v_mean: `[K, D]`; None where the calibration had no sums.
        k_weight, v_weight: `[K, D]`; None stands for 1.
        widths: bits of the components.
    """

    k: jax.Array
    v: jax.Array
    k_scale: jax.Array
    v_scale: jax.Array
    k_mean: jax.Array | None
    v_mean: jax.Array | None
    k_weight: jax.Array | None
    v_weight: jax.Array | None
    widths: Widths

    def saved(self) -> dict[str, jax.Array]:
        """As arrays by name: the widths as float32 `[rungs, 2, 5]`, components of each width and mean bytes."""
        arrays = {name: x for name, x in self._asdict().items() if name != "widths" and x is not None}
        if not self.widths.rungs:  # nothing of no size is saved
            return arrays
        rungs = [
            [[dict(runs).get(bits, 0) for bits in WIDTHS] + [mean] for runs, mean in zip(profile, means, strict=True)]
            for profile, means in zip(self.widths.rungs, self.widths.mean, strict=True)
        ]
        return arrays | {"widths": jnp.asarray(np.array(rungs, np.float32).reshape(-1, 2, 5))}

    @classmethod
    def restored(cls, arrays: dict[str, jax.Array]) -> "TransformBases":
        """What `saved` returned."""
        rungs = np.asarray(arrays["widths"]).astype(int).tolist() if "widths" in arrays else []

        def runs(side):
            return tuple((bits, count) for bits, count in zip(WIDTHS, side[:4], strict=True) if count)

        profiles = tuple((runs(k), runs(v)) for k, v in rungs)
        mean = tuple((k[4], v[4]) for k, v in rungs)
        return cls(**dict.fromkeys(cls._fields) | arrays | {"widths": Widths(profiles, mean)})  # type: ignore[arg-type]


class Side(NamedTuple):
    """Keys or values of a calibration, layer by layer; float64.

    Attributes:
        vectors: `[L, J, W, W]`, columns of falling variance.
        variances: of them `[L, J, W]`.
        mean: `[L, K, D]` or None.
        weight: `[L, K, D]` or None.
    """

    vectors: np.ndarray
    variances: np.ndarray
    mean: np.ndarray | None
    weight: np.ndarray | None


def principal(spec: AttentionSpec, moments: Moments, tap: str, groups: int, weight: np.ndarray | None = None) -> Side:
    """Principal directions of `k`, `k_pre` or `v` around their mean, each channel times `weight` `[L, K, D]` before."""
    mean = moments.mean(tap)
    moment = np.asarray(getattr(moments, tap), np.float64) / moments.tokens - mean[:, :, None] * mean[:, None]
    if weight is not None:
        flat = weight.reshape(len(weight), -1)
        moment = moment * flat[:, :, None] * flat[:, None]
    values, vectors = np.linalg.eigh(head_blocks(moment, groups))
    by_head = (*mean.shape[:1], spec.kv_heads, spec.head_dim)
    centre = mean.reshape(by_head) if getattr(moments, f"{tap}_sum") is not None else None
    return Side(vectors[..., ::-1], np.maximum(values[..., ::-1], 0.0), centre, weight)


def errors_of(side: Side, counts: float | None) -> np.ndarray:
    """What is lost without a component, `[L, W]`, summed over the bases of a layer and comparable across layers.

    Args:
        counts: see `Metric`.
    """
    variances = side.variances.sum(1)
    if counts is None:
        return variances
    total = variances.sum(-1, keepdims=True)
    return counts * variances / np.where(total > 0, total, 1.0)


def layer_bases(k: Side, v: Side, layer: int, widths: Widths) -> TransformBases:
    """Float32 bases of a layer, with the columns that any of its profiles has bits for."""
    arrays: dict[str, Any] = {}
    for name, side, index in (("k", k, 0), ("v", v, 1)):
        most = max((components_of(profile[index]) for profile in widths.rungs), default=side.vectors.shape[-1])
        deviation = np.sqrt(side.variances[layer])
        floor = np.maximum(deviation.max(-1, keepdims=True) * LEAST, np.finfo(np.float32).tiny * 1e6)
        arrays[name] = side.vectors[layer, ..., :most]
        arrays[f"{name}_scale"] = np.maximum(deviation, floor)[:, :most]
        arrays[f"{name}_mean"] = None if side.mean is None else side.mean[layer]
        arrays[f"{name}_weight"] = None if side.weight is None else side.weight[layer]
    found = {name: None if x is None else jnp.asarray(x, jnp.float32) for name, x in arrays.items()}
    return TransformBases(**found, widths=widths)


def mean_bytes(profiles: list[Profile]) -> tuple[int, int]:
    """Bytes of keys and of values of a token on average over layers, rounded up."""
    k, v = (-(-sum(bytes_of(profile[side]) for profile in profiles) // len(profiles)) for side in (0, 1))
    return k, v


# ---- as they are read


def encoder(bases: TransformBases, side: str, runs: WidthRuns | None) -> jax.Array:
    """`[J, W, R]`, float32: takes a token without its mean to its code, in units of the steps where there are `runs`."""
    basis, columns = _columns(bases, side, runs)
    weight = getattr(bases, f"{side}_weight")
    if weight is not None:
        basis = basis * weight.astype(jnp.float32).reshape(basis.shape[0], -1, 1)
    return basis / columns


def decoder(bases: TransformBases, side: str, runs: WidthRuns | None) -> jax.Array:
    """`[J, W, R]`, float32: what takes a code back, its transpose to the right."""
    basis, columns = _columns(bases, side, runs)
    weight = getattr(bases, f"{side}_weight")
    if weight is not None:
        basis = basis / weight.astype(jnp.float32).reshape(basis.shape[0], -1, 1)
    return basis * columns


def _columns(bases: TransformBases, side: str, runs: WidthRuns | None) -> tuple[jax.Array, jax.Array]:
    """U, and what its columns are multiplied by `[J, 1, R]`: the steps."""
    basis = getattr(bases, side).astype(jnp.float32)
    if runs is None:
        return basis, jnp.ones((1, 1, 1), jnp.float32)
    count = components_of(runs)
    scale = getattr(bases, f"{side}_scale").astype(jnp.float32)[:, :count]
    return basis[..., :count], (scale * jnp.asarray(steps_of(runs), jnp.float32))[:, None]
