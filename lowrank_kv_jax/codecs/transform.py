"""Transform coding: a basis that decorrelates, and in it bits by variance, attended without decompression.

After transform coding as pictures know it (Huang and Schultheiss, 1963) and KVTC (arXiv 2511.01815), which applies it to
caches that are stored away and decompresses them first.
"""

import bisect
import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp

from lowrank_kv_jax.attention.partial import AttnPartial
from lowrank_kv_jax.attention.spec import AttentionSpec
from lowrank_kv_jax.codecs.frame import Frame, around
from lowrank_kv_jax.codecs.transform_bases import (
    Side,
    TransformBases,
    Widths,
    decoder,
    encoder,
    errors_of,
    layer_bases,
    mean_bytes,
    principal,
)
from lowrank_kv_jax.codecs.transform_metrics import METRICS, Metric
from lowrank_kv_jax.estimators.bit_allocation import allocate, ladder
from lowrank_kv_jax.estimators.moments import Moments
from lowrank_kv_jax.estimators.rank_for_bytes import state_bytes
from lowrank_kv_jax.method import register
from lowrank_kv_jax.method.accounting import full_cache_bytes
from lowrank_kv_jax.method.codec import Ends, Logits, TokenCodec, codes_of
from lowrank_kv_jax.pallas_kernels.coefficient_attention import coefficient_attention
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention import rotary_coefficient_attention
from lowrank_kv_jax.segments import coded as coded_tokens
from lowrank_kv_jax.storage.basis import expand_values, fold_query
from lowrank_kv_jax.storage.state import state
from lowrank_kv_jax.storage.water_filled import empty_water_filled

SIDES = ("k", "v")


@state
class Transformed:
    """Codes of a layer's tokens."""

    tokens: coded_tokens.Coded


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
        rope: "pre" codes keys before RoPE, which compress better; "post" after it, which need not be rebuilt.
        heads: "joint", one basis for all heads of a layer; or "per_head", after which selections may give every head
            tokens of its own.
        metric: what errors cost, of `transform_metrics`: "loss", what they add to the model's loss (calibration runs
            backward, too); "attention", errors of logits and relative errors of values; "plain", relative errors.
        sinks, recent: exact tokens at both ends.
        smaller: instead of `bits`: as many as leave the bytes of a request (exact ends and positions too, room for new
            tokens in both caches, but not the bases, which all requests share) so many times below a 16-bit full cache.
        profiles: different widths that the layers of a model may have, each a program of its own.
    """

    bits: float | None = 2.0
    bits_k: float | None = None
    bits_v: float | None = None
    rope: str = "pre"
    heads: str = "joint"
    metric: str = "loss"
    sinks: int = 4
    recent: int = 32
    smaller: float | None = None
    profiles: int = 8

    calibrated: ClassVar[bool] = True
    bases_type: ClassVar[type | None] = TransformBases

    def __post_init__(self):
        allowed = {"rope": ("pre", "post"), "heads": ("joint", "per_head"), "metric": tuple(METRICS)}
        for field, values in allowed.items():
            if getattr(self, field) not in values:
                raise ValueError(f"{field}={getattr(self, field)!r}: allowed are {', '.join(values)}")
        for field in ("bits", "bits_k", "bits_v"):
            value = getattr(self, field)
            if value is not None and not 0 < value <= 8:
                raise ValueError(f"{field}={value!r}: must lie above 0 and be at most 8, or be None")
        if self.smaller is not None and not self.smaller > 0:
            raise ValueError(f"smaller={self.smaller!r}: must be a positive number")
        for field, least in (("sinks", 0), ("recent", 0), ("profiles", 1)):
            value = getattr(self, field)
            if type(value) is not int or value < least:
                raise ValueError(f"{field}={value!r}: must be an int of at least {least}")
        if self.bits is None and (self.bits_k is None) != (self.bits_v is None):
            raise ValueError("bits=None: give bits_k and bits_v, or neither")

    # ---- calibration --------------------------------------------------------------------------------------------

    def groups(self, spec: AttentionSpec) -> int:
        """J, the bases of a layer."""
        return 1 if self.heads == "joint" else spec.kv_heads

    def fit(self, spec: AttentionSpec, moments: Moments) -> tuple[TransformBases, ...]:
        """Bases of each layer, float32.

        Raises:
            ValueError: moments without what `metric` reads.
        """
        keys = "k_pre" if self.rope == "pre" else "k"
        metric = METRICS[self.metric](spec, moments, keys)
        k = principal(spec, moments, keys, self.groups(spec), metric.k)
        v = principal(spec, moments, "v", self.groups(spec), metric.v)
        return tuple(layer_bases(k, v, layer, own) for layer, own in enumerate(self._widths(metric, k, v)))

    @property
    def reads(self):
        return frozenset({"moments", "sensitivity"} if self.metric == "loss" else {"moments"})

    def _widths(self, metric: Metric, k: Side, v: Side) -> list[Widths]:
        """Of each layer."""
        bits = self.mean_bits
        spectra = errors_of(k, metric.k_counts), errors_of(v, metric.v_counts)
        if self.smaller is not None:
            rungs = ladder(spectra, self.profiles)
            means = tuple(map(mean_bytes, rungs))
            return [Widths(tuple(own), means) for own in zip(*rungs, strict=True)]
        if bits is None:
            return [Widths((), ())] * len(k.variances)
        found = allocate(spectra, bits, self.profiles, pooled=self.pooled)
        return [Widths((profile,), (mean_bytes(found),)) for profile in found]

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
        key: dict[str, Any] = {"fit": "water-filled pca", "rope": self.rope, "heads": self.heads, "metric": self.metric}
        if self.smaller is not None:
            return key | {"bits": "any", "profiles": self.profiles}
        if self.mean_bits is None:
            return key | {"bits": None}
        return key | {"bits": list(self.mean_bits), "pooled": self.pooled, "profiles": self.profiles}

    def check_bases(self, spec, bases):
        if bases is None:
            return
        groups, width = self.groups(spec), spec.kv_heads // self.groups(spec) * spec.head_dim
        for side in SIDES:
            found = getattr(bases, side).shape[:2]
            if found != (groups, width):
                raise ValueError(f"bases.{side} has {found[0]} heads of width {found[1]}; {self.name} with these "
                                 f"settings takes {groups} of {width}: calibrate for it")
        found = len(bases.widths.rungs)
        if not (found > 1 if self.smaller is not None else found == (self.mean_bits is not None)):
            raise ValueError(f"bases with {found} sets of widths: {self.name} with these settings takes none for floats, "
                             "one where bits are given, many for smaller; calibrate for it")

    # ---- the contract -------------------------------------------------------------------------------------------

    def ends(self, layout, bases):
        return Ends(self.sinks, self.recent, asked=(self.sinks, self.recent))

    def settled(self, layout, bases, weigh):
        """The bits of `smaller`: the same rung for every layer, found by what a token takes on average.

        Raises:
            ValueError: no bits make the cache as small.
        """
        if self.smaller is None:
            return bases
        rungs, means = bases.widths.rungs, bases.widths.mean
        target = full_cache_bytes(layout.spec, layout.batch * layout.capacity) / layout.spec.num_layers / self.smaller

        def spent(rung: int) -> int:
            mean = tuple(((8, count),) for count in means[rung])
            return state_bytes(weigh(layout, bases._replace(widths=Widths((mean,), (means[rung],)))))

        rung = bisect.bisect_left(range(len(rungs)), True, key=lambda i: spent(i) <= target)
        if rung == len(rungs):
            raise ValueError(f"smaller={self.smaller}: a prompt of {layout.prompt} tokens (capacity {layout.capacity}) "
                             f"is too short for it: with the fewest bits a layer takes {spent(rung - 1)} bytes of the "
                             f"{int(target)} wanted, exact tokens included; use a smaller ratio, or fewer sinks and "
                             "recent tokens")
        return bases._replace(widths=Widths((rungs[rung],), (means[rung],)))

    def units(self, spec, bases):
        return self.groups(spec)

    def empty(self, layout, bases, size, positions=None):
        heads = self.groups(layout.spec) if positions is None or positions.owner is None else 1

        def side(index: int) -> Any:
            if not bases.widths.rungs:
                shape = (layout.batch, heads, size, getattr(bases, SIDES[index]).shape[-1])
                return jnp.zeros(shape, jnp.dtype(layout.dtype))
            return empty_water_filled(layout.batch, heads, size, bases.widths.rungs[0][index])

        return Transformed(coded_tokens.without_tokens(side(0), side(1), positions))

    def frame(self, bases: TransformBases, store: Transformed) -> Frame:
        """What the codes of `store` are read in: steps are folded into it."""
        k, v = (runs_in(store, side) for side in SIDES)
        return Frame(decoder(bases, "k", k), decoder(bases, "v", v), bases.k_mean, bases.v_mean,
                     encoder(bases, "k", k), encoder(bases, "v", v))

    def encode(self, layout, bases, store, tokens):
        (one,) = tokens
        k, v = (x.astype(jnp.float32) for x in (one.k_pre if self.rope == "pre" else one.k, one.v))
        return self.frame(bases, store).code(k, v)

    def decode(self, layout, bases, store, k, v, positions, index):
        frame, (k, v) = self.frame(bases, store), (x.astype(jnp.float32) for x in (k, v))
        keys = frame.keys(layout.spec, self.rope, k, positions)
        return keys, frame.at(positions).rebuild("v", v, layout.spec.kv_heads)

    def attend(self, layout, bases, store, q, positions, place):
        spec, tokens, frame = layout.spec, coded_tokens.cached_tokens(store.tokens), self.frame(bases, store)
        common: dict[str, Any] = dict(scale=spec.scale, q_positions=positions, causal=False, window=place.window)
        if self.rope == "post" or spec.rope is None:
            out, lse = coefficient_attention(fold_query(frame.k, q, spec.kv_heads), tokens, **common)
            if frame.k_mean is not None:  # one number a query and head: it shifts the logits of all these tokens alike
                mean = jnp.repeat(frame.k_mean.astype(jnp.float32), spec.group_size, axis=0)
                lse = lse + spec.scale * jnp.einsum("btnd,nd->btn", q.astype(jnp.float32), mean)
        else:
            out, lse = rotary_coefficient_attention(
                q, tokens, frame.at(tokens.positions).k, rope=spec.rope, kv_heads=spec.kv_heads, key_mean=frame.k_mean,
                **common,
            )
        return AttnPartial(around(expand_values(frame.v, out, spec.kv_heads), lse, frame.v_mean), lse)

    def logits(self, layout, bases, store, q, place):
        spec, frame = layout.spec, self.frame(bases, store)
        if frame.k_mean is None and (self.rope == "post" or spec.rope is None):
            return Logits(fold_query(frame.k, q, spec.kv_heads), store.tokens.k)
        codes = codes_of(store)[0].astype(jnp.float32)
        return Logits(q, frame.keys(spec, self.rope, codes, store.tokens.positions))


def runs_in(store: Transformed, side: str) -> Any:
    """Widths of the stored keys or values; None of floats."""
    return getattr(getattr(store.tokens, side), "runs", None)
