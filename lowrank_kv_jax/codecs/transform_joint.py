"""One basis for keys and values: both are read from one hidden state, and much of what they say is the same."""

import numpy as np

from lowrank_kv_jax.attention.spec import AttentionSpec
from lowrank_kv_jax.codecs.transform_bases import Side, blocks_of_units, centre_of, covariance
from lowrank_kv_jax.codecs.transform_metrics import Metric
from lowrank_kv_jax.estimators.host_eigh import host_eigh
from lowrank_kv_jax.estimators.moments import Moments


def principal_of_both(
    spec: AttentionSpec, moments: Moments, tap: str, layers: tuple[int, ...], units: int, metric: Metric
) -> tuple[Side, Side]:
    """Principal directions of keys (`tap`) and values of a group side by side, around their means: their halves.

    Errors of both are comparable: those that a metric counts relative to a side's variance are weighted so.

    Args:
        units: J, each of the keys of its heads and of their values.
    """
    names, count = (tap, "v"), len(layers)
    own = [covariance(moments, (name, name), layers) for name in names]
    weights = (_weight(spec, np.diagonal(own[0]), layers, metric.k, metric.k_counts),
               _weight(spec, np.diagonal(own[1]), layers, metric.v, metric.v_counts))
    k, v = (weight.ravel() for weight in weights)
    across = blocks_of_units(covariance(moments, (tap, "v"), layers) * k[:, None] * v, count, units)
    of_k, of_v = (blocks_of_units(moment * w[:, None] * w, count, units) for moment, w in zip(own, (k, v), strict=True))
    values, vectors = host_eigh(np.block([[of_k, across], [across.swapaxes(1, 2), of_v]]))
    variances, halves = np.maximum(values[..., ::-1], 0.0), np.split(vectors[..., ::-1], 2, axis=1)
    keys, of_values = (Side(half, variances, centre_of(spec, moments, name, layers), weight)
                       for half, name, weight in zip(halves, names, weights, strict=True))
    return keys, of_values


def _weight(
    spec: AttentionSpec, variances: np.ndarray, layers: tuple[int, ...], weight: np.ndarray | None, counts: float | None
) -> np.ndarray:
    """What channels are multiplied by, `[G, K, D]`.

    Args:
        variances: of the channels as they are `[G * W]`.
        weight: `[L, K, D]` or None, and `counts`: see `Metric`.
    """
    found = np.ones((len(layers), spec.kv_heads, spec.head_dim)) if weight is None else weight[list(layers)]
    if counts is None:
        return found
    total = (variances * found.ravel() ** 2).sum()
    return found * np.sqrt(counts * len(layers) / (total if total > 0 else 1.0))
