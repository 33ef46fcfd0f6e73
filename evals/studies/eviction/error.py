"""What eviction costs inside of each layer, and what moments recover (MomentKV, figures 2 and 3)."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.attention.sink_logits import with_sink
from lowrank_kv_jax.attention.spec import Taps
from lowrank_kv_jax.generation.forward import compress_group, embed_tokens, layer_prefill, make_layout
from lowrank_kv_jax.method import Layout, Part, Place
from lowrank_kv_jax.methods import machine_of
from lowrank_kv_jax.pallas_kernels.coefficient_attention import coefficient_attention
from lowrank_kv_jax.storage.cached_tokens import CachedTokens
from lowrank_kv_jax.storage.positions import Runs
from lowrank_kv_jax.summaries import moments as moment_summary

ORDERS = ("0", "1", "gaussian")


@dataclasses.dataclass(frozen=True)
class LayerError:
    """Of one method in one layer, means over query heads and the queries that follow the prompt.

    Attributes:
        spec, layer: which.
        mass: w_E, attention that went to evicted tokens.
        angle: cosine of f_E with f_R (figure 2c).
        error: ||f - f_R|| / ||f|| (equation 7).
        corrected: ||f - f^|| / ||f|| by order.
        cosine: of f^_E with f_E by order (figure 3c).
        partition: log Z^_E - log Z_E by order.
    """

    spec: str
    layer: int
    mass: float
    angle: float
    error: float
    corrected: dict[str, float]
    cosine: dict[str, float]
    partition: dict[str, float]


def mean_error(rows: Sequence[LayerError], layer: int) -> LayerError:
    """The mean of some errors of one method, as the error of `layer`."""
    plain = {name: float(np.mean([getattr(row, name) for row in rows])) for name in ("mass", "angle", "error")}
    by_order = {
        name: {order: float(np.mean([getattr(row, name)[order] for row in rows])) for order in ORDERS}
        for name in ("corrected", "cosine", "partition")
    }
    return LayerError(rows[0].spec, layer, **plain, **by_order)


def average(texts: Sequence[Sequence[LayerError]]) -> list[LayerError]:
    """Means over several texts, layer by layer and method by method."""
    return [mean_error(same, same[0].layer) for same in zip(*texts, strict=True)]


def measured_layers(config: Any) -> list[int]:
    """Layers that see everything: where a window slides moments are not merged, as they do not know what has left it.

    Raises:
        ValueError: there is none.
    """
    layers = [layer for layer, window in enumerate(config.windows) if window is None]
    if not layers:
        raise ValueError(f"windows={config.windows}: every layer of this model slides one, and the study error is of "
                         "layers that see everything")
    return layers


def eviction_errors(
    model: Any, methods: Mapping[str, Part], tokens: np.ndarray, queries: int = 32
) -> list[LayerError]:
    """Compress all but the last `queries` of `tokens` `[S]` and attend with those, in `measured_layers`.

    Args:
        methods: by spec, each with the sums of a Gaussian summary ("moments:order=gaussian").

    Raises:
        ValueError: as `measured_layers`.
    """
    config, prompt, measured = model.config, len(tokens) - queries, measured_layers(model.config)
    layout = make_layout(config, 1, prompt, len(tokens), queries, jnp.float32)
    ids = jnp.asarray(tokens, jnp.int32)[None]
    x = embed_tokens(config, model.params, ids)
    positions = jnp.arange(len(tokens), dtype=jnp.int32)[None]
    rows = []
    for layer, weights in enumerate(model.params["layers"]):
        x, taps = layer_prefill(config.by_layer[layer], config.windows[layer], weights, x, positions)
        if layer not in measured:
            continue
        before, after = taps.part(slice(prompt)), taps.part(slice(prompt, None))
        for spec, method in methods.items():
            bases = method.default_bases(config.attention)[layer]
            own = layout.of_layer(layer)
            state = compress_group(method, own, bases, (before,), jnp.asarray([prompt], jnp.int32))
            found = _partials(method, own, bases, state, before, after.q, positions[:, prompt:])
            rows.append(_measure(spec, layer, jax.tree.map(lambda y: np.asarray(y, np.float64), found)))
    return rows


@functools.partial(jax.jit, static_argnames=("method", "layout"))
def _partials(method: Any, layout: Layout, bases: Any, state: Any, prompt: Taps, q, positions) -> dict[str, Any]:
    """Exact attention over the prompt, over its retained tokens, and the approximations of the rest."""
    k, v = prompt.k.swapaxes(1, 2), prompt.v.swapaxes(1, 2)
    none = jnp.zeros((1, 1), jnp.int32)
    everything = CachedTokens(k, v, jnp.full((1,), layout.prompt, jnp.int32), Runs(none, none))
    scale = layout.spec.scale
    full = coefficient_attention(q, everything, **layout.spec.logits, q_positions=positions, causal=False, window=None)
    sums = state.gone[0]
    first = {"k_covariance": None, "longest": None}
    orders = {"0": {"covariance": None} | first, "1": first}
    retained = machine_of(method).retained(layout, bases, state, q, positions, Place())
    found = {"full": full, "retained": retained}
    return {name: with_sink(part, prompt.sink_logits) for name, part in found.items()} | {
        order: moment_summary.partial(dataclasses.replace(sums, **orders.get(order, {})), q, scale) for order in ORDERS
    }


def _measure(spec: str, layer: int, found: dict[str, Any]) -> LayerError:
    full, kept = found["full"], found["retained"]
    share = np.exp(kept.lse - full.lse)
    mass = np.maximum(1 - share, 1e-7)
    evicted = (full.out - share[..., None] * kept.out) / mass[..., None]
    norm = np.linalg.norm(full.out, axis=-1)
    corrected, cosine, partition = {}, {}, {}
    for order in ORDERS:
        part = found[order]
        lse = np.logaddexp(kept.lse, part.lse)
        out = np.exp(kept.lse - lse)[..., None] * kept.out + np.exp(part.lse - lse)[..., None] * part.out
        corrected[order] = float(np.mean(np.linalg.norm(full.out - out, axis=-1) / norm))
        cosine[order] = float(np.mean(_cosine(part.out, evicted)))
        partition[order] = float(np.mean(part.lse - full.lse - np.log(mass)))
    error = np.linalg.norm(full.out - kept.out, axis=-1) / norm
    angle = float(np.mean(_cosine(evicted, kept.out)))
    return LayerError(spec, layer, float(np.mean(mass)), angle, float(np.mean(error)), corrected, cosine, partition)


def _cosine(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.sum(x * y, axis=-1) / np.maximum(np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1), 1e-30)
