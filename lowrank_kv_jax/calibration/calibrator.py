"""Moments and votes of any decoder's taps, summed text by text, and the bases that a method takes from them."""

import functools
from collections.abc import Collection, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.attention.spec import AttentionSpec, Taps
from lowrank_kv_jax.attention.taps import half_split
from lowrank_kv_jax.calibration.checkpoint_sums import CheckpointedSums
from lowrank_kv_jax.calibration.layer_votes import votes_above, votes_counted
from lowrank_kv_jax.calibration.needs import check_taps_suffice, groups_read, groups_read_by_values, voting_parts
from lowrank_kv_jax.estimators.moments import (
    Across,
    KeysByValues,
    Moments,
    layer_moments,
    moments_across,
    moments_by_values,
    whole_moments,
)
from lowrank_kv_jax.method import Part
from lowrank_kv_jax.method.filling import checked_lengths
from lowrank_kv_jax.methods.parse import as_method
from lowrank_kv_jax.storage.cache_dtype import floating
from lowrank_kv_jax.storage.sharding import to_host

_layer_moments = functools.partial(jax.jit, static_argnums=0)(layer_moments)
_moments_across, _moments_by_values = jax.jit(moments_across), jax.jit(moments_by_values)


class Calibrator:
    """Sums what a decoder of your own shows of texts; `bases` fits methods to the sums.

    Products of one text are taken in float32 on the device, around its mean; texts are summed in float64 on the host.

    Args:
        spec: the decoder's attention.
        methods: what bases are wanted for, or their specs; where one reads votes, every text has to be read twice.
        groups, by_values: adjacent layers of which `Moments.across` and `Moments.keys_by_values` are wanted beside those
            that the methods read.
        sums: goes on where these stand, of `tokens` tokens.

    Raises:
        ValueError: a method that does not suit the decoder, or that reads more of a text than taps show.
    """

    def __init__(
        self, spec: AttentionSpec, *methods: Part | str, groups: Collection[tuple[int, ...]] = (),
        sums: CheckpointedSums | None = None, tokens: int = 0, by_values: Collection[tuple[int, ...]] = (),
    ):
        if spec.latent is not None:
            raise ValueError("calibration: this model caches latents (MLA); no method that does so is calibrated")
        self._voting: list[Part] = []
        for method in map(as_method, methods):
            check_taps_suffice(spec, method)
            groups = [*groups, *groups_read(spec, method)]
            by_values = [*by_values, *groups_read_by_values(spec, method)]
            self._voting += voting_parts(method)
        self.spec, self.tokens = spec, tokens
        self.groups, self.by_values = sorted(set(groups)), sorted(set(by_values))
        self._sums = sums or CheckpointedSums(None, {})

    def add(self, taps: Iterable[Taps], lengths: jax.Array | np.ndarray | None = None) -> None:
        """Add texts that attended exactly and causally from position 0 on.

        Args:
            taps: of each layer in order, `[B, T, ...]`; taken one after the other where it is a generator. With `reread`
                (`attend_twice`) its votes are counted, too: those of the text, without its copy.
            lengths: int32 `[B]`, tokens that count of rows padded on the right; None means all.

        Raises:
            ValueError: another number of layers than the decoder has; votes that are missing or of other shapes; moments
                or votes that are not finite (layer and tap are named). Nothing of these texts is added then.
        """
        layers: dict[str, list[np.ndarray]] = {}
        others: dict[str, np.ndarray] = {}
        recent: list[Taps] = []
        above: list[np.ndarray] = []
        longest, count, in_rows = max(map(len, (*self.groups, *self.by_values)), default=0), 0, []
        for layer, own in enumerate(taps):
            spec, count = self.spec.of_layer(min(layer, self.spec.num_layers - 1)), layer + 1
            own = half_split(spec, own)
            if layer == 0:
                batch, width = own.k.shape[:2]
                positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (batch, width))
                counts = checked_lengths(lengths, batch, width)
                valid, in_rows = positions < counts[:, None], to_host(counts).tolist()
            found = _layer_moments(spec, own._replace(x=None, reread=None), positions, valid)
            for name, product in whole_moments(found).items():
                layers.setdefault(name, []).append(_finite(product, name, layer))
            if own.reread is not None:
                above.append(votes_above(own, in_rows, layer))
            recent = [*recent, own._replace(q=None, x=None, reread=None)][-longest:] if longest else []
            for groups, sums, named in ((self.groups, _moments_across, _across_name),
                                        (self.by_values, _moments_by_values, _by_values_name)):
                for group in (one for one in groups if one[-1] == layer):
                    for name, product in sums(recent[-len(group):], valid).items():
                        others[named(group, name)] = _finite(product.whole()[0], name, layer)
        if count != self.spec.num_layers:
            raise ValueError(f"taps of {count} layers: this decoder has num_layers={self.spec.num_layers}")
        self._check_votes(len(above))
        if above:
            counted = votes_counted(self.spec.kv_heads, in_rows)
            others |= {_ABOVE: np.stack(above), _COUNTED: np.asarray(counted)}
        for name, product in {**{name: np.stack(found) for name, found in layers.items()}, **others}.items():
            self._sums.add(name, product)
        self.tokens += sum(in_rows)

    def _check_votes(self, layers: int) -> None:
        """Raise ValueError where texts that were read once are to give votes, or only some layers have them."""
        if self._voting and not layers:
            part = self._voting[0]
            instead = f", or give {part.without['votes']}" if "votes" in part.without else ""
            raise ValueError(f"taps.reread=None: {part.name} reads what a second reading attends to; read texts twice "
                             f"(prompt_twice, attend_twice){instead}")
        if layers not in (0, self.spec.num_layers):
            raise ValueError(f"taps.reread: {layers} layers have it, and the decoder has {self.spec.num_layers}")

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
        by_values = {group: KeysByValues(**{name: arrays[_by_values_name(group, name)] for name in KeysByValues._fields})
                     for group in self.by_values}
        of_layers = {name: array for name, array in arrays.items() if name in Moments._fields}
        votes = arrays[_ABOVE] / arrays[_COUNTED] if arrays.get(_COUNTED, 0) else None
        together: dict[str, Any] = {"across": across or None, "keys_by_values": by_values or None}
        return Moments(tokens=self.tokens, votes=votes, **together, **of_layers)  # type: ignore[arg-type]

    def bases(self, method: Part | str, dtype: Any = jnp.bfloat16) -> tuple[Any, ...]:
        """What `plan_layers` takes: an entry for each of the method's layer groups, floats in the given dtype.

        Raises:
            ValueError: as the class; layers that share a basis were not summed together; no text was added.
            TypeError: a dtype that is not floating, or that JAX would not hold (float64 without x64).
        """
        method, dtype = as_method(method), floating(dtype)
        check_taps_suffice(self.spec, method)
        return fit_to(self.spec, method, self.moments(), dtype) if method.calibrated else method.default_bases(self.spec)


def fit_to(spec: AttentionSpec, method: Part, moments: Moments, dtype: Any) -> tuple[Any, ...]:
    """`method.fit` with floats in the given dtype."""
    bases = method.fit(spec, moments)
    return jax.tree.map(lambda u: jnp.asarray(u, dtype if jnp.issubdtype(u.dtype, jnp.floating) else None), bases)


_ABOVE, _COUNTED = "votes above edges", "votes counted"
"""Names of sums; each layer has as many votes."""


def _across_name(group: tuple[int, ...], name: str) -> str:
    return f"{name} of layers {group[0]} to {group[-1]}"


def _by_values_name(group: tuple[int, ...], name: str) -> str:
    return f"{name} by v of layers {group[0]} to {group[-1]}"


def _finite(found: np.ndarray, name: str, layer: int) -> np.ndarray:
    if not np.isfinite(found).all():
        raise ValueError(f"calibration: the second moments of tap {name!r} in layer {layer} are not finite; "
                         "the weights or the activations hold NaN, or they overflow")
    return found
