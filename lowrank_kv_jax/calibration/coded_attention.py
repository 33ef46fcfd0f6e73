"""What the codes of transform coding do to the outputs of attention, differentiable: the codec's own functions, in which
rounding lets gradients pass straight through."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.attention.spec import Taps
from lowrank_kv_jax.calibration.backward import causal_logits, mixed, softmax
from lowrank_kv_jax.calibration.taps import iterate_taps
from lowrank_kv_jax.codecs.transform_bases import SIDES, TransformBases
from lowrank_kv_jax.codecs.transform_store import runs_in
from lowrank_kv_jax.method import Layout, Part
from lowrank_kv_jax.method.codec import Tokens
from lowrank_kv_jax.method.layout import layout_of
from lowrank_kv_jax.methods.compose import machine_of
from lowrank_kv_jax.models.config import ModelConfig
from lowrank_kv_jax.storage.positions import Runs
from lowrank_kv_jax.storage.water_filled import WidthRuns, pack, unpack

QUERIES = 128
"""Of a text, that are drawn from its second half; they see all keys before them."""


@dataclasses.dataclass(frozen=True)
class Group:
    """Layers that are coded together, hashable by value.

    Attributes:
        layers: their numbers.
        codec: of transform coding.
        config: of the model, with the rotary embedding of these layers.
        layout: of one row, a text.
        windows: sliding window of each layer, or None.
    """

    layers: tuple[int, ...]
    codec: Any
    config: ModelConfig
    layout: Layout
    windows: tuple[int | None, ...]

    @functools.cached_property
    def kind(self) -> "Group":
        """The same for all groups that can share their programs."""
        return dataclasses.replace(self, layers=tuple(range(len(self.layers))))


class Seen(NamedTuple):
    """What a group's layers show of n texts.

    Attributes:
        taps: of each layer; keys and values of all tokens `[n, T, K, D]`, queries of some `[n, Q, N, D]`.
        at: int32 `[n, Q]`, where those queries stand.
        outward: output projection of each layer `[N * D, H]`.
    """

    taps: tuple[Taps, ...]
    at: jax.Array
    outward: tuple[jax.Array, ...]

    def of_text(self, index: int) -> "Seen":
        """Of one text alone."""
        cut = slice(index, index + 1)
        taps = (own._replace(q=own.q[cut], k=own.k[cut], k_pre=own.k_pre[cut], v=own.v[cut]) for own in self.taps)
        return self._replace(taps=tuple(taps), at=self.at[cut])


def groups_of(model: Any, method: Part, texts: np.ndarray, seed: int = 0) -> Iterator[tuple[Group, Seen]]:
    """Each layer group of a method, and what it shows of texts, int32 `[n, T]`; one group is alive at a time.

    Raises:
        ValueError: texts of exact tokens alone.
    """
    config, codec, length = model.config, machine_of(method).codec, texts.shape[1]
    layout = layout_of(config.attention, 1, length, length)
    ends = codec.ends(layout, None)
    if length <= ends.sinks + ends.recent + 1:
        raise ValueError(f"windows of {length} tokens: the first {ends.sinks} and last {ends.recent} are exact, nothing "
                         "is left to refine for")
    rng, late = np.random.default_rng(seed), np.arange(length // 2, length)
    drawn = [np.sort(rng.choice(late, min(QUERIES, len(late)), replace=False)) for _ in texts]
    at = jnp.asarray(np.stack(drawn), jnp.int32)
    taps = iterate_taps(config, model.params, jnp.asarray(texts))
    for layers in codec.layer_groups(config.attention):
        own = tuple(_some(next(taps), at) for _ in layers)
        weights = [model.params["layers"][layer] for layer in layers]
        outward = tuple(own.get("attention", own)["o_proj"]["kernel"] for own in weights)
        windows = tuple(config.windows[layer] for layer in layers)
        group = Group(layers, codec, config.by_layer[layers[0]], layout.of_group(layers), windows)
        yield group, Seen(own, at, outward)


def _some(taps: Taps, at: jax.Array) -> Taps:
    """Float32, with the queries at `at` `[n, Q]` alone."""
    q = jnp.take_along_axis(taps.q, at[:, :, None, None], axis=1)
    k, k_pre, v = (x.astype(jnp.float32) for x in (taps.k, taps.k_pre, taps.v))
    return Taps(q.astype(jnp.float32), k, k_pre, v, sink_logits=taps.sink_logits)


@functools.partial(jax.jit, static_argnums=0)
def output_error(group: Group, bases: TransformBases, seen: Seen) -> jax.Array:
    """Squared error of the outputs of attention behind their projections, beside their squares, of one text.

    Tokens are exact to queries that stand less than `recent` behind them, as while decoding. Layers count by the loss
    that their values' variance is worth under `metric=loss`, or alike.
    """
    codec, layout, at, taps = group.codec, group.layout, seen.at, seen.taps
    ends, length = codec.ends(layout, bases), taps[0].k.shape[1]
    positions = jnp.arange(length, dtype=jnp.int32)
    coded = (positions >= ends.sinks) & (positions < length - ends.recent)
    store = codec.learn(layout, bases, codec.empty(layout, bases, 1), taps, jnp.asarray([length]), 1.0 * coded[None])
    tokens = tuple(Tokens(own.k, own.k_pre, own.v, positions[None]) for own in taps)
    codes = zip(codec.encode(layout, bases, store, tokens), SIDES, strict=True)
    k, v = (_as_stored(x, runs_in(store, side)) if x.shape[-1] else x for x, side in codes)
    where = Runs(*2 * [jnp.zeros((1, 2), jnp.int32)])
    far = ((at[..., None] - positions >= ends.recent) & (positions >= ends.sinks))[:, None, None]
    errors = []
    for index, (own, window, outward) in enumerate(zip(taps, group.windows, seen.outward, strict=True)):
        keys, values = (x.swapaxes(1, 2) for x in codec.decode(layout, bases, store, k, v, where, index))
        exact = causal_logits(group.config, window, own.q, own.k, at)
        p = softmax(jnp.where(far, causal_logits(group.config, window, own.q, keys, at), exact), own.sink_logits)
        wanted = mixed(softmax(exact, own.sink_logits), own.v)
        error = mixed(p, own.v) + mixed(jnp.where(far, p, 0), values - own.v) - wanted
        squares = (jnp.sum(jnp.square(_projected(x, outward))) for x in (error, wanted))
        errors.append(next(squares) / jnp.maximum(next(squares), 1e-30))
    return _shares(bases, taps) @ jnp.stack(errors)


def _as_stored(codes: jax.Array, runs: WidthRuns) -> jax.Array:
    """What storage gives back of codes `[..., R]`; their gradient passes where they are not cut off."""
    half = jnp.concatenate([jnp.full(count, 2.0 ** (bits - 1)) for bits, count in runs])
    kept = jnp.clip(codes, -half, half)
    return kept + jax.lax.stop_gradient(unpack(pack(jax.lax.stop_gradient(codes), runs), runs) - kept)


def _projected(out: jax.Array, outward: jax.Array) -> jax.Array:
    """`[B, Q, H]` of `[B, Q, N, D]`."""
    return out.reshape(*out.shape[:2], -1) @ outward.astype(jnp.float32)


def _shares(bases: TransformBases, taps: tuple[Taps, ...]) -> jax.Array:
    """What each layer counts, `[G]`, 1 in all."""
    if bases.v_weight is None:
        return jnp.full(len(taps), 1 / len(taps))
    variances = jnp.stack([own.v.var((0, 1)) for own in taps])
    shares = (variances * jnp.square(bases.v_weight.astype(jnp.float32))).sum((1, 2))
    return shares / jnp.maximum(shares.sum(), 1e-30)
