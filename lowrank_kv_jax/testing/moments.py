"""Moments of random activations, and bases that are fitted to them."""

import functools
from typing import Any

import numpy as np

from lowrank_kv_jax.codecs.layer_groups import stride_groups
from lowrank_kv_jax.estimators.moments import Across, Fisher, KeysByValues, Moments, Sensitivity, head_blocks
from lowrank_kv_jax.method import Part
from lowrank_kv_jax.methods import machine_of
from lowrank_kv_jax.models.config import ModelConfig
from lowrank_kv_jax.testing.models import PLAIN


def random_moments(
    config: ModelConfig, seed: int = 0, *, means: bool = False, fisher: bool = False, group: int = 1
) -> Moments:
    """Moments of anisotropic random activations.

    Args:
        group: layers whose activations are correlated, and of which `Moments.across` is given; products of their keys and
            values are always given.
        means: of activations around a random mean, whose sums are given too.
        fisher: Fisher information is given too, a different one for each matrix.
    """
    spec, rng = config.attention, np.random.default_rng(seed)
    sums, drawn = [], []

    def moment(*lead, width):
        x = rng.normal(size=(*lead, 64, width)) * np.linspace(2.0, 0.2, width)
        if means:
            x = x + rng.normal(size=(*lead, 1, width))
            sums.append(x.sum(-2).astype(np.float32))
        drawn.append(x)
        return (np.swapaxes(x, -1, -2) @ x).astype(np.float32)

    layers, kv, dim = spec.num_layers, spec.kv_heads, spec.head_dim
    k, k_pre, v = (moment(layers, width=kv * dim) for _ in range(3))
    q, q_pre = (moment(layers, kv, width=dim) for _ in range(2))
    votes = np.sort(rng.random((layers, 61)) ** 2)[:, ::-1]  # the share of a layer's votes above rising edges
    information = None
    if fisher:
        weight, eye = rng.uniform(0.5, 2.0, (2, layers, 1, 1)), np.eye(kv * dim)
        information = Fisher(weight[0] * eye, weight[1] * eye, 1, np.sqrt(weight[:, :, 0, 0]).T)
    squares = rng.uniform(0.1, 2.0, (3, layers, 1, 1)) * np.linspace(0.2, 2.0, dim) * np.ones((kv, 1))
    by_values = {(layer,): KeysByValues(*(x[layer].T @ drawn[2][layer] for x in drawn[:2])) for layer in range(layers)}
    of_layers = Moments(64, k, k_pre, v, q, q_pre, *sums[:3], fisher=information, votes=votes,
                        sensitivity=Sensitivity(*squares), keys_by_values=by_values)
    moments = of_layers if group == 1 else _across_layers(of_layers, rng, group)
    return moments._replace(sampled=moments)  # a model that writes what it reads: all means stay what they are


def _across_layers(moments: Moments, rng, group: int) -> Moments:
    """The same with keys and values that the layers of a group mostly share."""
    layers, width = moments.k.shape[:2]
    groups, new = stride_groups(layers, group), {}
    across, drawn = {own: {} for own in groups if len(own) > 1}, {own: {} for own in groups}
    for name in Across._fields:
        diagonal = []
        for own in groups:
            shared = rng.normal(size=(64, 1, width)) * np.linspace(2.0, 0.2, width)
            x = (shared + 0.3 * rng.normal(size=(64, len(own), width)) + moments.mean(name)[list(own)]).reshape(64, -1)
            drawn[own][name] = x
            if len(own) > 1:
                across[own][name] = x.T @ x
            diagonal.append(head_blocks((x.T @ x)[None], len(own))[0])
            new.setdefault(f"{name}_sum", []).append(x.sum(0).reshape(len(own), width))
        new[name] = np.concatenate(diagonal)
        new[f"{name}_sum"] = np.concatenate(new[f"{name}_sum"])
    by_values = {own: KeysByValues(*(x[name].T @ x["v"] for name in KeysByValues._fields)) for own, x in drawn.items()}
    across = {own: Across(**found) for own, found in across.items()}
    return moments._replace(across=across, keys_by_values=by_values, **new)


@functools.cache
def bases_for(method: Part, config: ModelConfig = PLAIN) -> Any:
    """The bases of a method, None for each group where it is not calibrated."""
    groups = machine_of(method).layer_groups(config.attention) if method.calibrated else ()
    return method.fit(config.attention, random_moments(config, group=max(map(len, groups), default=1)))
