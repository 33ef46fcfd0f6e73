"""Tokens as they are: the uncompressed cache, and how a selection stores what it keeps by default."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from lowrank_kv_jax.method import register
from lowrank_kv_jax.method.codec import Ends, Logits, TokenCodec
from lowrank_kv_jax.pallas_kernels.coefficient_attention import coefficient_attention
from lowrank_kv_jax.storage.cache_dtype import narrow
from lowrank_kv_jax.storage.cached_tokens import CachedTokens
from lowrank_kv_jax.storage.positions import PerHead, Runs
from lowrank_kv_jax.storage.state import leaf, state


@state
class Kept:
    """Tokens as they are.

    Attributes:
        k, v: `[B, J, S, D]`, keys after RoPE; v has no channels where the keys are the values (latent attention).
        length: int32 `[B]`, tokens held by each row.
        positions: where they stood.
    """

    k: jax.Array = leaf("batch", "kv_heads", "tokens", "head_dim", kind="exact")
    v: jax.Array = leaf("batch", "kv_heads", "tokens", "head_dim", kind="exact")
    length: jax.Array = leaf("batch", kind="indices")
    positions: Runs | PerHead


@state
class Verbatim:
    """Tokens of a layer: those that a selection keeps, or all of them where they are cut over devices."""

    tokens: Kept


@register("full")
@dataclasses.dataclass(frozen=True)
class Full(TokenCodec):
    """Exact keys and values of every token."""

    exact_at: ClassVar[Mapping[str, Any] | None] = {}
    latents: ClassVar[bool] = True
    implied: ClassVar[bool] = True

    def ends(self, layout, bases):
        """All tokens, in one buffer; where slots are cut over devices, those since the last refresh."""
        return Ends(0, 0) if layout.token_devices > 1 else Ends(layout.capacity, 0, flushes=False)

    def units(self, spec, bases):
        return spec.kv_heads

    def empty(self, layout, bases, size, positions=None):
        if positions is None:
            nowhere = jnp.zeros((layout.batch, 2), jnp.int32)
            positions, shape = Runs(nowhere, nowhere), (layout.batch, layout.spec.kv_heads, size)
        else:
            shape = positions.position.shape
        spec, dtype = layout.spec, jnp.dtype(layout.dtype)
        k, v = (jnp.zeros((*shape, width), dtype) for width in (spec.head_dim, 0 if spec.latent else spec.head_dim))
        return Verbatim(Kept(k, v, jnp.zeros((layout.batch,), jnp.int32), positions))

    def encode(self, layout, bases, store, tokens):
        (one,) = tokens
        k, v = (narrow(x.swapaxes(1, 2), layout.dtype) for x in (one.k, one.v))
        return k, v

    def decode(self, layout, bases, store, k, v, positions, index):
        return k, v

    def attend(self, layout, bases, store, q, positions, place, beside=None):
        kept = store.tokens
        values = kept.v if kept.v.shape[3] else kept.k
        return coefficient_attention(
            q, CachedTokens(kept.k, values, kept.length, kept.positions), **layout.spec.logits, q_positions=positions,
            causal=False, window=place.window, beside=beside,
        )

    def logits(self, layout, bases, store, q, place):
        return Logits(q, store.tokens.k)
