"""The choice: candidates with scores and budgets in, slots that are kept out."""

import jax
import jax.numpy as jnp


def ranks(scores: jax.Array, owners: jax.Array | None = None, heads: int = 1) -> jax.Array:
    """Rank of each candidate, 0 for the highest score; of equal scores the earlier slot ranks higher.

    Args:
        scores: float32 `[..., S]`; -inf for slots that are no candidates.
        owners: int `[..., S]` in 0..heads - 1: ranks count within the candidates of one head. None: one head.

    Returns:
        int32 `[..., S]`.
    """
    order = jnp.argsort(-scores, axis=-1, stable=True)
    if owners is None:
        return _inverse(order)
    # one sort serves the ranks within all heads, and with them those without owners: a compiler sees it only once
    mine = jnp.take_along_axis(owners, order, axis=-1)[..., None, :] == jnp.arange(heads)[:, None]
    before = jnp.cumsum(mine, axis=-1, dtype=jnp.int32) - 1
    rank = jnp.sum(jnp.where(mine, before, 0), axis=-2, dtype=jnp.int32)
    return jnp.put_along_axis(jnp.zeros_like(rank), order, rank, axis=-1, inplace=False)


def head_counts(chosen: jax.Array, owners: jax.Array, heads: int) -> jax.Array:
    """How many of `chosen` bool `[..., S]` belong to each head: int32 `[..., heads]`."""
    mine = owners[..., None, :] == jnp.arange(heads)[:, None]
    return jnp.sum(mine & chosen[..., None, :], axis=-1, dtype=jnp.int32)


def compact(chosen: jax.Array, size: int) -> jax.Array:
    """Slots of the first `size` chosen ones, in order: int32 `[..., size]`, 0 where there are fewer.

    Args:
        chosen: bool `[..., S]`.
    """
    flat = chosen.reshape(-1, chosen.shape[-1])
    target = jnp.where(flat, jnp.cumsum(flat, axis=-1) - 1, size)
    slots = jnp.arange(flat.shape[-1], dtype=jnp.int32)
    out = jax.vmap(lambda at: jnp.zeros((size,), jnp.int32).at[at].set(slots, mode="drop"))(target)
    return out.reshape(*chosen.shape[:-1], size)


def take_slots(x: jax.Array, slots: jax.Array) -> jax.Array:
    """`x` `[B, J, S, ...]` at `slots` `[B, J, M]`: `[B, J, M, ...]`."""
    return jnp.take_along_axis(x, slots.reshape(*slots.shape, *(1,) * (x.ndim - 3)), axis=2)


def _inverse(order: jax.Array) -> jax.Array:
    slots = jnp.broadcast_to(jnp.arange(order.shape[-1], dtype=jnp.int32), order.shape)
    return jnp.put_along_axis(jnp.zeros_like(slots), order, slots, axis=-1, inplace=False)
