"""Tokens as they are: the uncompressed cache, and how a selection stores what it keeps by default."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp

from lowrank_kv_jax.method import register
from lowrank_kv_jax.method.codec import Ends, Logits, TokenCodec
from lowrank_kv_jax.pallas_kernels.coefficient_attention import coefficient_attention
from lowrank_kv_jax.segments.exact import Exact
from lowrank_kv_jax.storage.cache_dtype import narrow
from lowrank_kv_jax.storage.cached_tokens import CachedTokens
from lowrank_kv_jax.storage.positions import Runs
from lowrank_kv_jax.storage.state import state


@state
class Verbatim:
    """Selected tokens of a layer, keys after RoPE."""

    tokens: Exact


@register("full")
@dataclasses.dataclass(frozen=True)
class Full(TokenCodec):
    """Exact keys and values of every token."""

    exact_at: ClassVar[Mapping[str, Any] | None] = {}
    latents: ClassVar[bool] = True
    implied: ClassVar[bool] = True

    def ends(self, layout, bases):
        return Ends(layout.capacity, 0, flushes=False)

    def units(self, spec, bases):
        return spec.kv_heads

    def empty(self, layout, bases, size, positions=None):
        if positions is None:
            nowhere = jnp.zeros((layout.batch, 2), jnp.int32)
            positions, shape = Runs(nowhere, nowhere), (layout.batch, layout.spec.kv_heads, size)
        else:
            shape = positions.position.shape
        buffer = jnp.zeros((*shape, layout.spec.head_dim), jnp.dtype(layout.dtype))
        return Verbatim(Exact(buffer, jnp.zeros_like(buffer), jnp.zeros((layout.batch,), jnp.int32), positions))

    def encode(self, layout, bases, store, tokens):
        (one,) = tokens
        k, v = (narrow(x.swapaxes(1, 2), layout.dtype) for x in (one.k, one.v))
        return k, v

    def decode(self, layout, bases, store, k, v, positions, index):
        return k, v

    def attend(self, layout, bases, store, q, positions, place):
        kept = store.tokens
        return coefficient_attention(
            q, CachedTokens(kept.k, kept.v, kept.length, kept.positions), **layout.spec.logits, q_positions=positions,
            causal=False, window=place.window,
        )

    def logits(self, layout, bases, store, q, place):
        return Logits(q, store.tokens.k)
