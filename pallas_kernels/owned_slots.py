"""Tokens of all heads packed in one buffer, as kernels read them: each head is a row, over its first slot to its last.

Tokens come head after head, so that nothing else is read. Methods that put new tokens where old ones were leave some of
other heads among them, which a mask hides.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lowrank_kv_jax.attention.partial import AttnPartial
from lowrank_kv_jax.pallas_kernels.dispatch import Unsupported
from lowrank_kv_jax.pallas_kernels.packing import visible_range
from lowrank_kv_jax.storage.backend import on_gpu
from lowrank_kv_jax.storage.cached_tokens import Beside


class Rows(NamedTuple):
    """Queries by row, and the slots that they see.

    Attributes:
        q: `[B, T, N, R]`; of packed tokens `[B * K, T, N / K, R]`, heads of a row behind each other.
        begin, end: int32 `[B, T]` or `[B * K, T]`.
        tokens: what they read: of a part of a buffer the whole of it, where the slots count.
        owner: of packed tokens int8 `[B, 1, S]`, the kv head of each slot, which is the row's number modulo K.
    """

    q: jax.Array
    begin: jax.Array
    end: jax.Array
    tokens: Any
    owner: jax.Array | None = None

    def heads_of(self, part: AttnPartial, heads: int) -> AttnPartial:
        """A partial of the rows as one of `[B, T, N, ..]`, N = `heads`."""
        if self.owner is None:
            return part

        def together(x: jax.Array) -> jax.Array:
            rows, queries, each, *rest = x.shape
            x = x.reshape(-1, heads // each, queries, each, *rest).swapaxes(1, 2)
            return x.reshape(x.shape[0], queries, heads, *rest)

        return AttnPartial(together(part.out), together(part.lse))

    def beside(self, others: Beside) -> "Rows":
        """Other tokens of the same queries, by the same rows, of packed ones begin and end `[B, T]`."""
        own = rows_of(others.q, others.tokens, others.q_positions, others.causal, others.window)
        if self.owner is None:
            return own
        kv_heads = self.q.shape[0] // own.q.shape[0]
        keys, values = (x.reshape(-1, 1, *x.shape[2:]) for x in own.tokens[:2])
        return own._replace(q=_heads_as_rows(own.q, kv_heads), tokens=own.tokens._replace(keys=keys, values=values))


def _heads_as_rows(x: jax.Array, kv_heads: int) -> jax.Array:
    """`[B * K, T, N / K, ..]` of `[B, T, N, ..]`."""
    batch, queries, heads, *rest = x.shape
    x = x.reshape(batch, queries, kv_heads, heads // kv_heads, *rest).swapaxes(1, 2)
    return x.reshape(batch * kv_heads, *x.shape[2:])


def rows_of(q: jax.Array, tokens: Any, q_positions: jax.Array, causal: bool, window: int | None) -> Rows:
    """Queries `[B, T, N, R]` as rows.

    Raises:
        Unsupported: as `visible_range`.
    """
    where = tokens.positions
    owner = getattr(where, "owner", None)
    if owner is None:
        begin, end = visible_range(tokens, q_positions, causal, window)
        before = getattr(tokens.keys, "begin", 0)
        tokens = tokens._replace(keys=_whole(tokens.keys), values=_whole(tokens.values))
        return Rows(q, begin + before, end + before, tokens)
    if causal or window is not None:
        raise Unsupported("causal or windowed attention over tokens of all heads packed in one buffer")
    batch, queries = q.shape[:2]
    begin, end = ranges_of_heads(owner, tokens.lengths, where.kv_heads)

    def of_queries(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x.reshape(-1, 1), (batch * where.kv_heads, queries))

    return Rows(_heads_as_rows(q, where.kv_heads), of_queries(begin), of_queries(end), tokens, owner)


def ranges_of_heads(owner: jax.Array, lengths: jax.Array, kv_heads: int) -> tuple[jax.Array, jax.Array]:
    """The first slot of each head and the one behind its last, int32 `[B, K]`; of a head without tokens the first is not
    before the second.

    Args:
        owner: `[B, 1, S]`, kv heads of the slots; those from `lengths` `[B]` on are nobody's.
    """
    if on_gpu():
        from lowrank_kv_jax.pallas_kernels import gpu_owned  # Pallas is not where XLA is enough

        return gpu_owned.ranges_of_heads(owner, lengths, kv_heads, interpret=False)
    slots = jnp.arange(owner.shape[2], dtype=jnp.int32)
    mine = (owner == jnp.arange(kv_heads)[:, None]) & (slots < lengths[:, None, None])
    return jnp.min(jnp.where(mine, slots, len(slots)), axis=2), jnp.max(jnp.where(mine, slots + 1, 0), axis=2)


def _whole(stored: Any) -> Any:
    """The buffer of `segments.exact.Slots`; a slice would be a copy."""
    return getattr(stored, "buffer", stored)


def numbers(rows: int, owner: jax.Array) -> jax.Array:
    """The kv head of each of `rows` rows, int32 `[rows, 1]`."""
    return (jnp.arange(rows, dtype=jnp.int32) % (rows // owner.shape[0]))[:, None]
