"""Transform coding: a basis that decorrelates, and in it bits by variance, attended without decompression.

After transform coding as pictures know it (Huang and Schultheiss, 1963) and KVTC (arXiv 2511.01815), which applies it to
caches that are stored away and decompresses them first.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from lowrank_kv_jax.attention.rope import rope_angles
from lowrank_kv_jax.attention.spec import AttentionSpec
from lowrank_kv_jax.attention.turning import TILE, place_in_tile
from lowrank_kv_jax.codecs.frame import Frame
from lowrank_kv_jax.codecs.frame_attention import attend
from lowrank_kv_jax.codecs.layer_groups import stride_groups
from lowrank_kv_jax.codecs.transform_bases import (
    SIDES,
    TransformBases,
    decoder,
    errors_of,
    group_bases,
    principal,
)
from lowrank_kv_jax.codecs.transform_joint import principal_of_both
from lowrank_kv_jax.codecs.transform_metrics import METRICS
from lowrank_kv_jax.codecs.transform_rungs import largest_rung
from lowrank_kv_jax.codecs.transform_steps import of_each_row, with_steps_of
from lowrank_kv_jax.codecs.transform_store import (
    KeysOf,
    Transformed,
    coefficients,
    empty_store,
    means_in,
    runs_in,
    with_means_of,
)
from lowrank_kv_jax.codecs.widths import Widths, total_bytes
from lowrank_kv_jax.estimators.bit_allocation import Spectra, allocate, ladder
from lowrank_kv_jax.estimators.moments import Moments
from lowrank_kv_jax.estimators.turned import lengths_to, turned, turned_around_mean
from lowrank_kv_jax.method import register
from lowrank_kv_jax.method.codec import Ends, Logits, TokenCodec, codes_of
from lowrank_kv_jax.segments import coded as coded_tokens
from lowrank_kv_jax.storage.basis import fold_query

MANY_TILES = 32
"""From which on a last one that is not full is little."""

FARTHEST = 32768
"""Positions: beyond, bases for all of a model's context would be coarse for what is read in most of it."""


@register("transform")
@dataclasses.dataclass(frozen=True)
class Transform(TokenCodec):
    """Keys and values in their calibrated principal components, each in 8, 4, 2, 1 or no bits by its variance.

    Steps are calibrated too, so that no token has a scale: they fold into the query and into the expansion of the
    attended values, and attention runs on the codes. Keys before RoPE are rebuilt and rotated block by block.

    Attributes:
        bits: mean bits of a component, fractions allowed, up to 8; one budget over keys, values and layers. None keeps
            components as floats.
        bits_k, bits_v: instead, of keys or values alone; both then have a budget of their own.
        rope: "pre" codes keys before RoPE, which compress best, and rebuilds them; "tile" codes them turned by their
            place in a tile (`attention.turning`): queries are folded once a tile; "post" after RoPE: folded once.
        heads: "joint", one basis for all heads of a layer; or "per_head", after which selections may give every head
            tokens of its own.
        group: adjacent layers whose tokens are coded together, in one basis, None: all; the fewer bits for an error, and
            the more work, as every layer reads the codes of its group. The last group of a model may be smaller.
        kv: "apart", keys and values have a basis and codes each; "joint", one basis of both and one code, which is read
            as keys and as values: the fewer bytes for an error, and the more components to read on either side.
        means: "prompt", what tokens are coded around is fitted to each prompt; "calibrated", it is the calibration's.
        steps: "calibrated", those of the bases; "prompt", of components below 8 bits they follow the deviations of each
            prompt around what its tokens are coded around.
        sampled: bases are calibrated on text that the model writes itself, too, directions that it takes for likely, and
            on random names and numbers in it.
        metric: what errors cost, of `transform_metrics`: "loss", what they add to the model's loss (calibration runs
            backward, too); "attention", errors of logits and relative errors of values; "plain", relative errors.
        sinks, recent: exact tokens at both ends.
        recent_bits: 8, exact tokens and those that are appended are held in 8 bits, with a scale for each token and head;
            None, in the cache's dtype, as they are where appended tokens stay exact for good.
        smaller: instead of `bits`: as many as leave the bytes of a request (exact ends and positions too, room for new
            tokens in both caches, but not the bases, which all requests share) so many times below a 16-bit full cache.
        profiles: different widths that the layers of a model may have, each a program of its own.
        positions: with rope=post, the longest texts that bases are fitted to, whatever the calibration's: what keys are
            after RoPE follows from what they are before it (`estimators.turned`). None: the model's context, `FARTHEST`
            at most.
    """

    bits: float | None = 2.0
    bits_k: float | None = None
    bits_v: float | None = None
    rope: str = "pre"
    heads: str = "joint"
    group: int | None = 1
    kv: str = "apart"
    means: str = "prompt"
    steps: str = "calibrated"
    sampled: bool = True
    metric: str = "loss"
    sinks: int = 4
    recent: int = 24
    recent_bits: int | None = 8
    smaller: float | None = None
    profiles: int = 8
    positions: int | None = None

    exact_at: ClassVar[Mapping[str, Any] | None] = {"bits": None, "sinks": 4, "recent": 8, "recent_bits": None}
    small: ClassVar[Mapping[str, Any]] = {"sinks": 4, "recent": 8}
    calibrated: ClassVar[bool] = True
    layers_alike: ClassVar[bool] = True
    default_block: ClassVar[int] = 16  # at sixteen times 32 exact tokens are a quarter of a cache of 2,048
    bases_type: ClassVar[type | None] = TransformBases
    without: ClassVar[Mapping[str, str]] = {"sensitivity": "metric=attention", "sampled": "sampled=False"}
    one_of: ClassVar[tuple[tuple[str, ...], ...]] = (("bits", "bits_k", "bits_v"), ("smaller",))
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {  # of arXiv 2511.01815, in these widths, before entropy coding
        "kvtc": {"group": None, "metric": "plain", "recent": 128, "recent_bits": None, "sampled": False},
    }

    def __post_init__(self):
        allowed = {"rope": ("pre", "tile", "post"), "heads": ("joint", "per_head"), "kv": ("apart", "joint"),
                   "means": ("prompt", "calibrated"), "steps": ("calibrated", "prompt"), "metric": tuple(METRICS)}
        for field, values in allowed.items():
            if getattr(self, field) not in values:
                raise ValueError(f"{field}={getattr(self, field)!r}: allowed are {', '.join(values)}")
        for field in ("bits", "bits_k", "bits_v"):
            value = getattr(self, field)
            if value is not None and not 0 < value <= 8:
                raise ValueError(f"{field}={value!r}: must lie above 0 and be at most 8, or be None")
        if self.smaller is not None and not self.smaller > 0:
            raise ValueError(f"smaller={self.smaller!r}: must be a positive number")
        for field, least in (("group", 1), ("sinks", 0), ("recent", 0), ("profiles", 1), ("positions", 1)):
            value = getattr(self, field)
            if (type(value) is not int or value < least) and not (field in ("group", "positions") and value is None):
                raise ValueError(f"{field}={value!r}: must be an int of at least {least}")
        if self.positions is not None and self.rope != "post":
            raise ValueError(f"positions={self.positions}: must be None with rope={self.rope}, whose bases hold at any")
        if self.recent_bits not in (None, 8):
            raise ValueError(f"recent_bits={self.recent_bits!r}: must be 8 or None")
        if self.bits is None and (self.bits_k is None) != (self.bits_v is None):
            raise ValueError("bits=None: give bits_k and bits_v, or neither")
        if self.kv == "joint" and not self.pooled:
            field = "bits_v" if self.bits_k is None else "bits_k"
            raise ValueError(f"{field}={getattr(self, field)!r}: must be None with kv=joint, where keys and values have "
                             "one code; give bits=")

    @property
    def keys(self) -> str:
        """The tap that is coded as keys, turned by its place where `rope` is "tile"."""
        return "k" if self.rope == "post" else "k_pre"

    def farthest(self, spec: AttentionSpec) -> int:
        """Positions that bases of keys after RoPE are fitted to."""
        return self.positions or min(spec.context, FARTHEST)

    # ---- calibration --------------------------------------------------------------------------------------------

    def layer_groups(self, spec):
        return stride_groups(spec.num_layers, self.group or spec.num_layers)

    def validate(self, spec):
        if self.group is not None and self.group > spec.num_layers:
            raise ValueError(f"group={self.group}: the model has {spec.num_layers} layers")

    def fit(self, spec: AttentionSpec, moments: Moments) -> tuple[TransformBases, ...]:
        """Bases of each group of layers, float32.

        Raises:
            ValueError: moments without what `metric`, `group`, `kv` or `sampled` reads.
        """
        groups, units = self.layer_groups(spec), self.units(spec, None)
        keys = "k_pre" if self.rope == "pre" else "k"
        metric = METRICS[self.metric](spec, moments, keys)
        known = moments.with_sampled() if self.sampled else moments
        if self.rope == "tile":
            known = turned_around_mean(spec, known, TILE)
        elif self.rope == "post":
            known = turned(spec, known, lengths_to(self.farthest(spec)))
        if self.kv == "joint":
            both = [principal_of_both(spec, known, keys, layers, units, metric) for layers in groups]
            k, v = zip(*both, strict=True)
            errors = errors_of(k, groups, None)
            spectra = errors, errors[:, :0]
        else:
            k = [principal(spec, known, keys, layers, units, metric.k) for layers in groups]
            v = [principal(spec, known, "v", layers, units, metric.v) for layers in groups]
            spectra = errors_of(k, groups, metric.k_counts), errors_of(v, groups, metric.v_counts)
        widths = self._widths(spec, spectra)
        return tuple(group_bases(*own, joint=self.kv == "joint") for own in zip(k, v, widths, strict=True))

    @property
    def reads(self):
        more = {"sensitivity"} if self.metric == "loss" else set()
        more |= {"sampled"} if self.sampled else set()
        more |= {"keys_by_values"} if self.kv == "joint" else set()
        return frozenset({"moments"} | more | (set() if self.group == 1 else {"across"}))

    def _widths(self, spec: AttentionSpec, spectra: Spectra) -> list[Widths]:
        """Of each group."""
        groups, bits = self.layer_groups(spec), self.mean_bits
        components = spec.num_layers * spec.kv_heads * spec.head_dim // self.units(spec, None)
        if self.smaller is not None:
            rungs = ladder(spectra, 16 / self.smaller, self.profiles, components)  # no token takes more than its share
        elif bits is None:
            rungs = []
        else:
            rungs = [allocate(spectra, bits, self.profiles, self.pooled, components)]
        total, fit = tuple(map(total_bytes, rungs)), json.dumps(self.fit_key(spec))
        return [Widths(len(layers), tuple(rung[i] for rung in rungs), total, fit) for i, layers in enumerate(groups)]

    @property
    def mean_bits(self) -> tuple[float, float] | None:
        """Of components of keys and of values."""
        k, v = (self.bits if own is None else own for own in (self.bits_k, self.bits_v))
        return None if k is None or v is None else (float(k), float(v))

    @property
    def pooled(self) -> bool:
        """Whether keys and values share a budget."""
        return self.bits_k is None and self.bits_v is None

    def fit_key(self, spec):
        group = self.group or spec.num_layers
        key: dict[str, Any] = {"fit": "water-filled pca", "rope": self.rope, "heads": self.heads, "group": group,
                               "metric": self.metric, "sampled": self.sampled}
        key |= {} if self.kv == "apart" else {"kv": self.kv}
        key |= {"positions": self.farthest(spec)} if self.rope == "post" else {}
        key |= {"tile": TILE} if self.rope == "tile" else {}
        if self.smaller is not None:
            return key | {"smaller": self.smaller, "profiles": self.profiles}
        if self.mean_bits is None:
            return key | {"bits": None}
        return key | {"bits": list(self.mean_bits), "pooled": self.pooled, "profiles": self.profiles}

    def check_bases(self, spec, bases):
        if bases is None:
            return
        if bases.joint != (self.kv == "joint"):
            raise ValueError(f"bases of keys and values {'in one code' if bases.joint else 'apart'}: {self.name} with "
                             f"these settings takes kv={self.kv}; calibrate for it")
        units = self.units(spec, bases)
        width = bases.layers * spec.kv_heads // units * spec.head_dim
        for side in SIDES:
            found = getattr(bases, side).shape[:2]
            if found != (units, width):
                raise ValueError(f"bases.{side} has {found[0]} heads of width {found[1]}; {self.name} with these "
                                 f"settings takes {units} of {width}: calibrate for it")
            if (getattr(bases, f"{side}_unit") is None) == (getattr(bases, side).dtype == jnp.int8):
                raise ValueError(f"bases.{side} is {getattr(bases, side).dtype}: must be int8 with bases.{side}_unit, or "
                                 "floats without; calibrate again")
        found = len(bases.widths.rungs)
        if not (found > 0 if self.smaller is not None else found == (self.mean_bits is not None)):
            raise ValueError(f"bases with {found} sets of widths: {self.name} with these settings takes none for floats, "
                             "one where bits are given, some for smaller; calibrate for it")
        bases.widths.check_fit(self.name, self.fit_key(spec))

    # ---- the contract -------------------------------------------------------------------------------------------

    def ends(self, layout, bases):
        return Ends(self.sinks, self.recent, asked=(self.sinks, self.recent), bits=self.recent_bits)

    def settled(self, layout, bases, weigh):
        """The bits of `smaller`: the same rung for every group, found by what a token takes on average.

        Raises:
            ValueError: no bits make the cache as small.
        """
        if self.smaller is None:
            return bases
        return bases._replace(widths=bases.widths.only(largest_rung(layout, bases, weigh, self.smaller)))

    def units(self, spec, bases):
        return 1 if self.heads == "joint" else spec.kv_heads

    def empty(self, layout, bases, size, positions=None):
        if self.rope == "tile" and positions is None and size >= MANY_TILES * TILE:
            size = -(-size // TILE) * TILE  # an accelerator that goes over them in turns begins each with a tile
        heads = self.units(layout.spec, bases) if positions is None or positions.owner is None else 1
        return empty_store(layout, bases, heads, size, positions, own_means=self.means == "prompt",
                           own_steps=self.steps == "prompt")

    def learn(self, layout, bases, store, taps, lengths, weight):
        if self.means == "prompt":
            store = with_means_of(store, taps, self.keys, weight)
        return with_steps_of(bases, store, taps, self._coded(layout.spec, jnp.arange(weight.shape[1])[None]), weight)

    def frame(self, bases: TransformBases, store: Transformed, layer: int | jax.Array) -> Frame:
        """What that layer of the group reads the codes of `store` in: calibrated steps are folded in, a row's are not."""
        k, v = (decoder(bases, side, runs_in(store, side), layer) for side in SIDES)
        means = (means_in(bases, store, side) for side in SIDES)
        return Frame(k, v, *(None if mean is None else mean[..., layer, :, :] for mean in means))

    def _coded(self, spec: AttentionSpec, positions: jax.Array) -> KeysOf:
        """Which keys are coded, of tokens at `positions` `[B, T]`."""
        if self.rope != "tile" or spec.rope is None:
            return KeysOf(self.keys)
        return KeysOf(self.keys, rope_angles(spec.rope, place_in_tile(positions, self.sinks)[:, :, None, None]))

    def encode(self, layout, bases, store, tokens):
        steps = store.k_step, store.v_step
        codes = [found if own is None else found / own.astype(found.dtype)[:, :, None] for found, own in zip(
            coefficients(bases, store, tokens, self._coded(layout.spec, tokens[0].positions)), steps, strict=False)]
        return codes[0], codes[0][..., :0] if bases.joint else codes[1]

    def decode(self, layout, bases, store, k, v, positions, index):
        v = k if bases.joint else v
        frame, (k, v) = of_each_row(self.frame(bases, store, index), store), (x.astype(jnp.float32) for x in (k, v))
        keys = frame.keys(layout.spec, self.rope, k, positions, self.sinks)
        return keys, frame.at(positions).rebuild("v", v, layout.spec.kv_heads)

    def attend(self, layout, bases, store, q, positions, place, beside=None):
        frame = of_each_row(self.frame(bases, store, place.index), store)
        folds = self.rope == "post" or layout.spec.rope is None
        tokens = coded_tokens.cached_tokens(store.tokens)
        tokens = tokens._replace(values=tokens.keys) if bases.joint else tokens
        return attend(layout.spec, frame, tokens, q, positions, place, folds=folds, rotates=not folds,
                      origin=self.sinks if self.rope == "tile" else None, beside=beside)

    def logits(self, layout, bases, store, q, place):
        spec, frame = layout.spec, of_each_row(self.frame(bases, store, place.index), store)
        if frame.k_mean is None and (self.rope == "post" or spec.rope is None):
            return Logits(fold_query(frame.k, q, spec.kv_heads), store.tokens.k)
        codes = codes_of(store)[0].astype(jnp.float32)
        return Logits(q, frame.keys(spec, self.rope, codes, store.tokens.positions, self.sinks))
