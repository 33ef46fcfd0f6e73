"""A block of decode steps for rows that come and go: one program, whoever sits in the rows."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from lowrank_kv_jax.generation.forward import decode_step, refresh
from lowrank_kv_jax.method import Part
from lowrank_kv_jax.method.cache import Cache
from lowrank_kv_jax.models.config import ModelConfig
from lowrank_kv_jax.serving.sampling import Draws, sample_rows


class Seats(NamedTuple):
    """What the rows of a cache are to do, `[B]` each; kept on the host, where it is changed in place.

    Attributes:
        token: int32, the last one drawn, which no cache holds yet.
        active: bool; rows that are not active keep their cache as it is, and draw nothing.
        left: int32, tokens that may still be drawn.
        stops: int32 `[B, E]`, tokens that end a row, -1 where there are fewer.
        draws: how each row draws.
    """

    token: Int[jax.Array | np.ndarray, " B"]
    active: Bool[jax.Array | np.ndarray, " B"]
    left: Int[jax.Array | np.ndarray, " B"]
    stops: Int[jax.Array | np.ndarray, "B E"]
    draws: Draws


def empty_seats(rows: int, stops: int) -> Seats:
    """Seats that nobody has taken, as NumPy arrays."""
    ints, floats = np.zeros((4, rows), np.int32), np.ones((2, rows), np.float32)
    draws = Draws(np.zeros(rows, np.uint32), floats[0] - 1, ints[0], floats[1])
    return Seats(ints[1], np.zeros(rows, bool), ints[2], np.full((rows, stops), -1, np.int32), draws)


class Block(NamedTuple):
    """What a block of steps drew.

    Attributes:
        tokens: int32 `[B, block]`, -1 where none was drawn.
        active: bool `[B]`, rows that have not ended.
        broken: bool `[B]`, rows that ended because their logits were NaN.
    """

    tokens: Int[jax.Array, "B block"]
    active: Bool[jax.Array, " B"]
    broken: Bool[jax.Array, " B"]


@functools.partial(jax.jit, static_argnames=("method", "config"), donate_argnames=("cache",))
def serve_block(
    method: Part, config: ModelConfig, params: Any, cache: Cache, seats: Seats, *, bases: Any = None
) -> tuple[Cache, Block]:
    """Up to `block` decode steps on the device, then `refresh`; ends early when every row has ended.

    A row's tokens are those of `generation.generate.decode_block`: they depend on its own seat alone.

    Args:
        cache: donated, refreshed.
    """
    rows, block = cache.layout.batch, cache.layout.block

    def go_on(carry):
        return (carry[-1] < block) & jnp.any(carry[1].active)

    def step(carry):
        cache, seats, out, broken, i = carry
        active = seats.active
        cache, logits = decode_step(method, config, params, cache, seats.token, bases=bases, active=active)
        broken = broken | (active & jnp.any(jnp.isnan(logits), axis=-1))
        drew = active & ~broken
        token = jnp.where(drew, sample_rows(seats.draws, logits, cache.length), seats.token)
        left = seats.left - drew
        ended = (left <= 0) | jnp.any(token[:, None] == seats.stops, axis=1)
        out = out.at[:, i].set(jnp.where(drew, token, -1))
        return cache, seats._replace(token=token, active=drew & ~ended, left=left), out, broken, i + 1

    seats = jax.tree.map(jnp.asarray, seats)
    out, broken = jnp.full((rows, block), -1, jnp.int32), jnp.zeros((rows,), bool)
    cache, seats, out, broken, _ = jax.lax.while_loop(go_on, step, (cache, seats, out, broken, jnp.int32(0)))
    return refresh(method, cache, bases=bases), Block(out, seats.active, broken)
