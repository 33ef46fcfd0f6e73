"""Quantised keys and values: KIVI (Liu et al., 2024, "A tuning-free asymmetric 2bit quantization"), 8-bit KV."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from lowrank_kv_jax.codecs.quantised import TOKEN_BITS, Tile
from lowrank_kv_jax.method import KVMethod, register
from lowrank_kv_jax.methods.quantised_stage import QuantisedStage
from lowrank_kv_jax.pallas_kernels.coefficient_attention import coefficient_attention
from lowrank_kv_jax.partial import merge
from lowrank_kv_jax.positions import Runs
from lowrank_kv_jax.segments import coded as coded_tokens
from lowrank_kv_jax.segments import exact as exact_tokens
from lowrank_kv_jax.state import state


@state
class QuantisedState:
    """One layer's cache.

    Attributes:
        exact: sinks, the residual window and tokens that wait until their group is full.
        coded: the tokens between, quantised; J = K heads, R = D.
    """

    exact: exact_tokens.Exact
    coded: coded_tokens.Coded


@register("kivi")
@dataclasses.dataclass(frozen=True)
class KIVI(KVMethod):
    """Tokens in few bits, after RoPE, behind an exact residual window.

    Keys have channels of very different size: they share a scale along `group` tokens of one channel. Values share
    one along `group` channels of one token. Codes of 2 and 4 bits are asymmetric (a least value and a step for each
    group, in bfloat16) and packed in bytes; 8 bits are symmetric. Tokens are quantised in whole groups, once.

    `kivi:int8` is 8-bit KV, the usual baseline: one scale for each token and head.

    It is a codec too: `kivi:bits=4+kvzip:keep=0.25` stores the tokens that a selection keeps of the prompt in 4 bits.

    Attributes:
        bits: 2, 4 or 8; None stores the cache's dtype.
        keys: "per_channel", or "per_token" as values are.
        group: entries that share a scale; None is all channels of a token (needs keys="per_token").
        sinks: exact first tokens (KIVI keeps none).
        recent: the residual window, exact latest tokens at the least; up to `group` - 1 more wait with them.
    """

    bits: int | None = 2
    keys: str = "per_channel"
    group: int | None = 32
    sinks: int = 0
    recent: int = 32

    stage: ClassVar[str | None] = "codec"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "int8": {"bits": 8, "keys": "per_token", "group": None, "recent": 0}
    }

    def __post_init__(self):
        if self.bits is not None and self.bits not in TOKEN_BITS:
            raise ValueError(f"bits={self.bits!r}: allowed are None, {', '.join(map(str, TOKEN_BITS))}")
        if self.keys not in ("per_channel", "per_token"):
            raise ValueError(f"keys={self.keys!r}: allowed are per_channel, per_token")
        for field, least in (("group", 1), ("sinks", 0), ("recent", 0)):
            value = getattr(self, field)
            if not (field == "group" and value is None) and (type(value) is not int or value < least):
                raise ValueError(f"{field}={value!r}: must be an int of at least {least}")
        if self.group is None and self.keys == "per_channel":
            raise ValueError("group=None: keys='per_channel' need a number of tokens that share a scale")

    @property
    def unit(self) -> int:
        """Tokens that are quantised together."""
        return self.group if self.keys == "per_channel" and self.group is not None else 1

    @property
    def tiles(self) -> tuple[Tile, Tile]:
        """What shares a scale, of keys and of values."""
        by_token = Tile(1, self.group)
        return Tile(self.unit, 1) if self.keys == "per_channel" else by_token, by_token

    def validate(self, spec):
        if self.group is not None and self.group > spec.head_dim and self.keys == "per_token":
            raise ValueError(f"group={self.group}: must lie in 1..{spec.head_dim}, the head's channels, or be None")

    def as_codec(self) -> QuantisedStage:
        """How it stores what a selection keeps."""
        return QuantisedStage(self.bits, *self.tiles)

    def not_with(self, rule: Any) -> dict[str, bool]:
        """What of a composition with the selection `rule` cannot be, and whether it is there."""
        return {
            # what is chosen again would be coded again, and lose each time
            "decoding='evict' (give decoding=keep)": rule.decoding == "evict",
            f"budget_bytes={rule.budget_bytes} (give keep or budget)": rule.budget_bytes is not None,
            f"{self.name}'s sinks={self.sinks} (the selection has its own)": self.sinks != 0,
            f"{self.name}'s recent={self.recent} (the selection has its own)": self.recent not in (0, type(self).recent),
        }

    def init(self, layout, bases):
        spec, dtype = layout.spec, jnp.dtype(layout.dtype)
        exact = exact_tokens.empty_exact(
            layout.batch, spec.kv_heads, self.sinks + self.recent + self.unit - 1 + layout.block, spec.head_dim,
            dtype, gaps=(self.sinks, self.sinks),
        )
        coded = coded_tokens.empty_coded(
            layout.batch, (spec.kv_heads, spec.head_dim), (spec.kv_heads, spec.head_dim),
            max(layout.capacity - self.sinks - self.recent, self._most(layout)), dtype, self.bits,
            *(tile.within(spec.head_dim) for tile in self.tiles),
        )
        return QuantisedState(exact, coded)

    def compress(self, layout, bases, state, taps, lengths):
        (tap,) = taps
        counts = jnp.maximum(lengths - self.sinks - self.recent, 0) // self.unit * self.unit
        exact = exact_tokens.hold_prompt(
            state.exact, tap.k, tap.v, lengths, self.sinks, self.recent + self.unit - 1, left_out=counts
        )
        positions = _behind(self.sinks, counts)
        coded = dataclasses.replace(state.coded, positions=positions)
        if layout.prompt > self.sinks:
            k, v = (x[:, self.sinks :].swapaxes(1, 2) for x in (tap.k, tap.v))
            coded = coded_tokens.hold(coded, k, v, counts, positions)
        return QuantisedState(exact, coded)

    def append(self, layout, bases, state, taps, counts, positions, place):
        return dataclasses.replace(state, exact=exact_tokens.append(state.exact, taps.k, taps.v, counts))

    def attend(self, layout, bases, state, q, positions, place):
        scale = layout.spec.scale
        near = exact_tokens.attend(state.exact, q, positions, scale=scale, window=place.window)
        far = coefficient_attention(
            q, coded_tokens.cached_tokens(state.coded), scale=scale, q_positions=positions, causal=False,
            window=place.window,
        )
        return merge([near, far])

    def refresh(self, layout, bases, state):
        exact, flushed = exact_tokens.flush(state.exact, self.sinks, self.recent, self._most(layout), self.unit)
        return QuantisedState(exact, coded_tokens.append(state.coded, flushed.k, flushed.v, flushed.counts))

    def _most(self, layout) -> int:
        """Most tokens that leave the exact part at once."""
        return (self.unit - 1 + layout.block) // self.unit * self.unit


def _behind(sinks: int, counts: jax.Array) -> Runs:
    zero = jnp.zeros_like(counts)
    return Runs(jnp.stack([zero, counts], axis=1), jnp.stack([zero + sinks, zero], axis=1))
