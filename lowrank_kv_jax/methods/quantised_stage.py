"""How selected tokens are stored in few bits."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from lowrank_kv_jax.codecs.packed import PackedTokens, empty_packed, hold_packed
from lowrank_kv_jax.codecs.quantised import Tile
from lowrank_kv_jax.method import Layout
from lowrank_kv_jax.methods.stages import Selected, VerbatimStage
from lowrank_kv_jax.segments import coded as coded_tokens
from lowrank_kv_jax.segments.coded import Coded


@dataclasses.dataclass(frozen=True)
class QuantisedStage(VerbatimStage):
    """The codec that quantises tokens once: for selections that choose once, of the prompt.

    Attributes:
        bits: 2, 4 or 8; None stores the cache's dtype.
        keys, values: what shares a scale there; values have scales for each token.
    """

    bits: int | None
    keys: Tile
    values: Tile

    def slots(self, size):
        return -(-size // self.keys.tokens) * self.keys.tokens

    def empty(self, layout: Layout, bases: Any, exact, heads, size, positions):
        if not size:
            return Selected(exact, None)
        dim = layout.spec.head_dim
        keys, values = (tile.within(dim) for tile in (self.keys, self.values))
        packed = positions.owner is not None and self.bits is not None and keys.tokens > 1
        coded = coded_tokens.empty_coded(
            layout.batch, (heads, dim), (heads, dim), size, jnp.dtype(layout.dtype), self.bits,
            values if packed else keys, values,
        )
        if packed:
            room = empty_packed(layout.batch, positions.kv_heads, size, dim, self.bits, self.keys.tokens)
            coded = dataclasses.replace(coded, k=room)
        return Selected(exact, dataclasses.replace(coded, positions=positions))

    def hold(self, coded, k, v, length, positions):
        if isinstance(coded.k, PackedTokens):
            k = hold_packed(coded.k, k, positions.owner, length)
        else:
            k = coded_tokens.fill_tokens(coded.k, k, length)
        return Coded(k, coded_tokens.fill_tokens(coded.v, v, length), length, positions)
