"""Moments of any decoder's taps, summed text by text, and the bases that a method takes from them."""

import functools
from collections.abc import Collection, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.attention.spec import AttentionSpec, Taps
from lowrank_kv_jax.attention.taps import half_split
from lowrank_kv_jax.calibration.checkpoint_sums import CheckpointedSums
from lowrank_kv_jax.estimators.moments import Across, Moments, layer_moments, moments_across
from lowrank_kv_jax.method import Part
from lowrank_kv_jax.method.filling import checked_lengths
from lowrank_kv_jax.methods.compose import machine_of
from lowrank_kv_jax.methods.group_bases import check_ropes
from lowrank_kv_jax.methods.parse import as_method
from lowrank_kv_jax.storage.sharding import to_host

_layer_moments = functools.partial(jax.jit, static_argnums=0)(layer_moments)
_moments_across = jax.jit(moments_across)
SUMMED = frozenset({"moments", "across"})
"""What sums of taps can give of `Part.reads`."""


class Calibrator:
    """Sums what a decoder of your own shows of texts; `bases` fits methods to the sums.

    Products of one text are taken in float32 on the device, texts are summed in float64 on the host.

    Args:
        spec: the decoder's attention.
        methods: what bases are wanted for, or their specs.
        groups: adjacent layers of which `Moments.across` is wanted beside those that the methods read.
        sums: goes on where these stand, of `tokens` tokens.

    Raises:
        ValueError: a method that does not suit the decoder, or that reads more of a text than taps show.
    """

    def __init__(
        self, spec: AttentionSpec, *methods: Part | str, groups: Collection[tuple[int, ...]] = (),
        sums: CheckpointedSums | None = None, tokens: int = 0,
    ):
        if spec.latent is not None:
            raise ValueError("calibration: this model caches latents (MLA); no method that does so is calibrated")
        for method in map(as_method, methods):
            check_taps_suffice(spec, method)
            groups = [*groups, *groups_read(spec, method)]
        self.spec, self.tokens, self.groups = spec, tokens, sorted(set(groups))
        self._sums = sums or CheckpointedSums(None, {})

    def add(self, taps: Iterable[Taps], lengths: jax.Array | np.ndarray | None = None) -> None:
        """Add texts that attended exactly and causally from position 0 on.

        Args:
            taps: of each layer in order, `[B, T, ...]`; taken one after the other where it is a generator.
            lengths: int32 `[B]`, tokens that count of rows padded on the right; None means all.

        Raises:
            ValueError: another number of layers than the decoder has, or moments that are not finite (layer and tap are
                named). Nothing of these texts is added then.
        """
        layers: dict[str, list[np.ndarray]] = {}
        across: dict[str, np.ndarray] = {}
        recent: list[Taps] = []
        longest, count, tokens = max(map(len, self.groups), default=0), 0, 0
        for layer, own in enumerate(taps):
            spec, count = self.spec.of_layer(min(layer, self.spec.num_layers - 1)), layer + 1
            own = half_split(spec, own)
            if layer == 0:
                batch, width = own.k.shape[:2]
                positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (batch, width))
                valid = positions < checked_lengths(lengths, batch, width)[:, None]
                tokens = int(valid.sum())
            for name, product in _layer_moments(spec, own._replace(x=None, reread=None), positions, valid).items():
                layers.setdefault(name, []).append(_finite(product, name, layer))
            recent = [*recent, own._replace(q=None, x=None, reread=None)][-longest:] if longest else []
            for group in (one for one in self.groups if one[-1] == layer):
                for name, product in _moments_across(recent[-len(group):], valid).items():
                    across[_across_name(group, name)] = _finite(product, name, layer)
        if count != self.spec.num_layers:
            raise ValueError(f"taps of {count} layers: this decoder has num_layers={self.spec.num_layers}")
        for name, product in {**{name: np.stack(found) for name, found in layers.items()}, **across}.items():
            self._sums.add(name, product)
        self.tokens += tokens

    def moments(self) -> Moments:
        """`Moments` of float64 arrays over all texts so far.

        Raises:
            ValueError: there were none.
        """
        if not self.tokens:
            raise ValueError("calibration: no text was added")
        arrays = self._sums.arrays
        across = {group: Across(**{name: arrays[_across_name(group, name)] for name in Across._fields})
                  for group in self.groups}
        of_layers = {name: array for name, array in arrays.items() if name in Moments._fields}
        return Moments(tokens=self.tokens, across=across or None, **of_layers)  # type: ignore[arg-type]

    def bases(self, method: Part | str, dtype: Any = jnp.bfloat16) -> tuple[Any, ...]:
        """What `plan_layers` takes: an entry for each of the method's layer groups, floats in the given dtype.

        Raises:
            ValueError: as the class; layers that share a basis were not summed together; no text was added.
        """
        method = as_method(method)
        check_taps_suffice(self.spec, method)
        return fit_to(self.spec, method, self.moments(), dtype) if method.calibrated else method.default_bases(self.spec)


def fit_to(spec: AttentionSpec, method: Part, moments: Moments, dtype: Any) -> tuple[Any, ...]:
    """`method.fit` with floats in the given dtype."""
    bases = method.fit(spec, moments)
    return jax.tree.map(lambda u: jnp.asarray(u, dtype if jnp.issubdtype(u.dtype, jnp.floating) else None), bases)


def groups_read(spec: AttentionSpec, method: Part) -> list[tuple[int, ...]]:
    """Layers whose moments the method reads together."""
    return [group for group in method.layer_groups(spec) if len(group) > 1] if "across" in method.reads else []


def check_taps_suffice(spec: AttentionSpec, method: Part) -> None:
    """Raise ValueError where a method does not suit a decoder, or its `fit` reads more than sums of taps."""
    method.validate(spec)
    check_ropes(method, spec)
    for part in machine_of(method).parts:
        if getattr(part, "calibrated", False):
            more = sorted(part.reads - SUMMED)
            if more:
                instead = ",".join(part.without[name] for name in more if name in part.without)
                what = " and ".join(f"{name!r} ({COSTS[name]})" for name in more)
                raise ValueError(f"{part.name}: its bases read {what}, which taps do not show"
                                 + (f"; give {instead}" if instead else ""))


COSTS = {
    "fisher": "gradients by the projections", "sensitivity": "gradients by keys and values",
    "votes": "what a second reading attends to", "sampled": "text that the model writes",
}


def _across_name(group: tuple[int, ...], name: str) -> str:
    return f"{name} of layers {group[0]} to {group[-1]}"


def _finite(product: jax.Array, name: str, layer: int) -> np.ndarray:
    """Float64 on the host."""
    found = to_host(product).astype(np.float64)
    if not np.isfinite(found).all():
        raise ValueError(f"calibration: the second moments of tap {name!r} in layer {layer} are not finite; "
                         "the weights or the activations hold NaN, or they overflow")
    return found
