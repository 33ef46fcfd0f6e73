"""How selected tokens are stored: as they are or as coefficients; `quantised_stage` has few bits."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lowrank_kv_jax.cache_dtype import narrow
from lowrank_kv_jax.codecs.basis import fold_query
from lowrank_kv_jax.method import Layout, Place
from lowrank_kv_jax.methods.lowrank import LowRank
from lowrank_kv_jax.pallas_kernels.blockwise import slice_block
from lowrank_kv_jax.pallas_kernels.coefficient_attention import CachedTokens, coefficient_attention
from lowrank_kv_jax.partial import AttnPartial
from lowrank_kv_jax.positions import PerHead
from lowrank_kv_jax.rope import rope_angles, rotate
from lowrank_kv_jax.segments.coded import Coded
from lowrank_kv_jax.segments.exact import Exact
from lowrank_kv_jax.spec import Taps
from lowrank_kv_jax.state import state


@state
class Selected:
    """Tokens after RoPE, without a basis.

    Attributes:
        exact: sinks, recent tokens and those appended since the last refresh.
        coded: the selected tokens between them, as they are or quantised; None where a selection keeps none.
    """

    exact: Exact
    coded: Exact | Coded | None


class Readable(NamedTuple):
    """Queries and stored keys whose products are the logits: q `[B, T, N, R]`, keys `[B, J, S, R]`."""

    q: jax.Array
    keys: jax.Array


class Stage:
    """What codecs share that store a token on its own."""

    def slots(self, size: int) -> int:
        """Slots of a head's buffer with room for `size` tokens."""
        return size

    def hold(self, coded: Any, k: jax.Array, v: jax.Array, length: jax.Array, positions: PerHead) -> Any:
        """The segment `coded` with other tokens: codes `[B, J, S, R]`, of each row the first `length` `[B]`."""
        return dataclasses.replace(coded, k=k, v=v, length=length, positions=positions)


class VerbatimStage(Stage):
    """The codec that changes nothing."""

    def heads(self, layout: Layout, bases: Any) -> int:
        """Heads J in which stored tokens are told apart."""
        del bases
        return layout.spec.kv_heads

    def empty(self, layout: Layout, bases: Any, exact: Exact, heads: int, size: int, positions: PerHead) -> Selected:
        """An empty state with room for `size` selected tokens in each of `heads` buffers."""
        del bases
        if not size:
            return Selected(exact, None)
        buffer = jnp.zeros((layout.batch, heads, size, layout.spec.head_dim), jnp.dtype(layout.dtype))
        return Selected(exact, Exact(buffer, jnp.zeros_like(buffer), jnp.zeros((layout.batch,), jnp.int32), positions))

    def begin(self, layout: Layout, bases: Any, held: Any, tap: Taps, lengths: jax.Array) -> Any:
        """Fit whatever is fitted to the prompt."""
        del layout, bases, tap, lengths
        return held

    def encode_prompt(self, layout: Layout, bases: Any, held: Any, tap: Taps) -> tuple[jax.Array, jax.Array]:
        """Keys and values of the prompt as they are stored, `[B, J, S, R]`."""
        del bases, held
        k, v = (narrow(x.swapaxes(1, 2), layout.dtype) for x in (tap.k, tap.v))
        return k, v

    def take_in(self, layout, bases, held, k, v, positions, weight):
        """Code tokens `[B, T, K, D]` that leave the exact window; the state may adapt to those of `weight` 1."""
        del layout, bases, positions, weight
        return held, k.swapaxes(1, 2), v.swapaxes(1, 2)

    def decode(self, layout, bases, held, k, v, position):
        """Keys after RoPE and values `[B, J, S, D]` of codes at `position` `[B, J, S]`."""
        del layout, bases, held, position
        return k, v

    def attend(self, layout: Layout, bases: Any, held: Any, q: jax.Array, positions: jax.Array, place: Place):
        """Attention over the selected tokens."""
        del bases
        return attend_tokens(held.coded, held.coded.k, q, positions, layout.spec.scale, place.window)

    def readable(self, layout: Layout, bases: Any, held: Any, q: jax.Array) -> Readable:
        """For votes."""
        del layout, bases
        return Readable(q, held.coded.k)


def attend_tokens(tokens: Exact, keys: jax.Array, q, positions, scale, window) -> AttnPartial:
    """Attention over selected tokens, read with `keys` in place of their own; all lie before every query."""
    cached = CachedTokens(keys, tokens.v, tokens.length, tokens.positions)
    return coefficient_attention(q, cached, scale=scale, q_positions=positions, causal=False, window=window)


class BasisStage(Stage):
    """The codec of a low-rank method, its basis updates included; same functions as `VerbatimStage`."""

    def __init__(self, method: LowRank):
        self.method = method

    def heads(self, layout, bases):
        start = self.method.starting_bases(layout, bases)
        k, v = self.method.key_heads(layout.spec, start), start.v.shape[-3]
        if k != v:
            raise ValueError(f"{self.method.name}: keys in {k} and values in {v} heads cannot be selected together")
        return k

    def empty(self, layout, bases, exact, heads, size, positions):
        method, dtype = self.method, jnp.dtype(layout.dtype)
        start = method.starting_bases(layout, bases)
        k, v = (jnp.zeros((layout.batch, heads, size, u.shape[-1]), dtype) for u in start)
        coded = Coded(k, v, jnp.zeros((layout.batch,), jnp.int32), positions)
        return method.empty_state(layout, bases, start, exact, coded)

    def begin(self, layout, bases, held, tap, lengths):
        return self.method.fit_prompt(layout, bases, held, tap, lengths)

    def encode_prompt(self, layout, bases, held, tap):
        keys = tap.k_pre if self.method.rope == "pre" else tap.k
        k, v = (narrow(x, layout.dtype) for x in self.method.encode(bases, held, keys, tap.v))
        return k, v

    def take_in(self, layout, bases, held, k, v, positions, weight):
        if self.method.rope == "pre":
            cos, sin = rope_angles(layout.spec.rope, positions[:, :, None])
            k = rotate(k.astype(jnp.float32), cos, -sin)
        if self.method.adapts:
            held = self.method.adapt(layout, bases, held, k, v, positions, weight)
        k, v = (narrow(x, layout.dtype) for x in self.method.encode(bases, held, k, v))
        return held, k, v

    def decode(self, layout, bases, held, k, v, position):
        use, heads = self.method.bases_of(bases, held), layout.spec.kv_heads
        k, v = (self.method.rebuild(use, side, x, heads) for side, x in (("k", k), ("v", v)))
        if self.method.rope == "pre":
            k = rotate(k, *rope_angles(layout.spec.rope, position))
        return self.method.with_gamma(layout.spec, bases, k), v

    def attend(self, layout, bases, held, q, positions, place):
        return self.method.attend_coded(layout, self.method.bases_of(bases, held), held, q, positions, place)

    def readable(self, layout, bases, held, q):
        use, keys = self.method.bases_of(bases, held), held.coded.k
        q = self.method.scaled(layout.spec, bases, q)
        if self.method.rope == "post":
            return Readable(fold_query(use.k, q, layout.spec.kv_heads), keys)
        keys = slice_block(keys, 0, keys.shape[2])
        keys = self.method.rebuild(use, "k", keys, layout.spec.kv_heads)
        return Readable(q, rotate(keys, *rope_angles(layout.spec.rope, held.coded.positions.position)))
