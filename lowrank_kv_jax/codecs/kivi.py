"""Quantised keys and values: KIVI (Liu et al., 2024, "A tuning-free asymmetric 2bit quantization"), 8-bit KV."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp

from lowrank_kv_jax.method import register
from lowrank_kv_jax.method.codec import Ends, Logits, TokenCodec
from lowrank_kv_jax.pallas_kernels.coefficient_attention import coefficient_attention
from lowrank_kv_jax.segments import coded as coded_tokens
from lowrank_kv_jax.storage.quantised import TOKEN_BITS, Tile
from lowrank_kv_jax.storage.state import state

RESIDUAL = 32


@state
class Quantised:
    """Quantised tokens of a layer, keys after RoPE; J = K heads, R = D."""

    tokens: coded_tokens.Coded


@register("kivi")
@dataclasses.dataclass(frozen=True)
class KIVI(TokenCodec):
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
        recent: the residual window, exact latest tokens at the least; up to `group` - 1 more wait with them. None is 32,
            and behind a selection as many as that has.
    """

    bits: int | None = 2
    keys: str = "per_channel"
    group: int | None = 32
    sinks: int = 0
    recent: int | None = None

    exact_at: ClassVar[Mapping[str, Any] | None] = {"bits": None, "sinks": 4, "recent": 8}
    small: ClassVar[Mapping[str, Any]] = {"sinks": 4, "recent": 8}
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
            if not (field != "sinks" and value is None) and (type(value) is not int or value < least):
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

    # ---- the contract -------------------------------------------------------------------------------------------

    def ends(self, layout, bases):
        recent = RESIDUAL if self.recent is None else self.recent
        return Ends(self.sinks, recent, unit=self.unit, asked=(self.sinks, self.recent or 0))

    def units(self, spec, bases):
        return spec.kv_heads

    def empty(self, layout, bases, size, positions=None):
        spec = layout.spec
        each = (spec.kv_heads, spec.head_dim)
        tiles = (tile.within(spec.head_dim) for tile in self.tiles)
        return Quantised(
            coded_tokens.empty_coded(
                layout.batch, each, each, size, jnp.dtype(layout.dtype), self.bits, *tiles, positions,
                whole_tiles=positions is None,
            )
        )

    def encode(self, layout, bases, store, tokens):
        (one,) = tokens
        return one.k.swapaxes(1, 2), one.v.swapaxes(1, 2)

    def decode(self, layout, bases, store, k, v, positions, index):
        return k, v

    def attend(self, layout, bases, store, q, positions, place, beside=None):
        return coefficient_attention(
            q, coded_tokens.cached_tokens(store.tokens), **layout.spec.logits, q_positions=positions, causal=False,
            window=place.window, beside=beside,
        )

    def logits(self, layout, bases, store, q, place):
        return Logits(q, store.tokens.k)
