"""The uncompressed cache: what everything else is measured against."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from lowrank_kv_jax.method import KVMethod, register
from lowrank_kv_jax.segments import exact as exact_tokens


@register("full")
@dataclasses.dataclass(frozen=True)
class Full(KVMethod):
    """Exact keys and values of every token."""

    latents: ClassVar[bool] = True

    def init(self, layout, bases):
        spec = layout.spec
        return exact_tokens.empty_exact(
            layout.batch, spec.kv_heads, layout.capacity, spec.head_dim, jnp.dtype(layout.dtype),
            gaps=(layout.capacity, layout.capacity), value_dim=0 if spec.latent else None,
        )

    def compress(self, layout, bases, state, taps, lengths):
        (tap,) = taps
        return exact_tokens.hold_prompt(state, tap.k, tap.v, lengths, sinks=layout.capacity, recent=0)

    def append(self, layout, bases, state, taps, counts, positions, place):
        return exact_tokens.append(state, taps.k, taps.v, counts)

    def attend(self, layout, bases, state, q, positions, place):
        return exact_tokens.attend(state, q, positions, scale=layout.spec.scale, window=place.window)
