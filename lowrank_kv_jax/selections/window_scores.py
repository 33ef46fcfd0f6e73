"""Votes of an observation window (Li et al., 2024, "SnapKV"): the prompt's last queries choose, neighbours are pooled."""

import jax
import jax.numpy as jnp

from lowrank_kv_jax.attention.importance import window_attention_by_query_head

POOLS = ("avg", "max", "none")
GROUPS = ("after", "before")


def window_scores(
    q: jax.Array, k: jax.Array, lengths: jax.Array, *, window: int, excluded: int, pool: str, kernel: int, group: str,
    scale: float, cap: float | None = None, sink_logits: jax.Array | None = None, sliding: int | None = None,
) -> jax.Array:
    """Scores of a prompt's tokens.

    Args:
        q: `[B, S, N, D]` after RoPE; k: `[B, S, K, D]`.
        lengths: int32 `[B]`.
        window: last queries that vote.
        excluded: last tokens that are kept anyway and lend nothing to their neighbours.
        pool, kernel: "avg", "max" or "none" over `kernel` tokens.
        scale, cap, sink_logits, sliding: as for `window_attention_by_query_head`.
        group: sum over the query heads of a kv head "after" or "before" pooling; under "max" the order matters.

    Returns:
        float32 `[B, K, S]`. The sum over the window; implementations that take means differ by a constant.
    """
    rule = {"scale": scale, "cap": cap, "sink_logits": sink_logits, "sliding": sliding}
    votes = window_attention_by_query_head(q, k, lengths, window, **rule)
    inside = jnp.arange(k.shape[1])[None] < lengths[:, None] - excluded
    votes = jnp.where(inside[:, None, None], votes, 0.0)
    if group == "before":
        return pooled(votes.sum(2), pool, kernel)
    return pooled(votes, pool, kernel).sum(2)


def pooled(x: jax.Array, pool: str, kernel: int) -> jax.Array:
    """Pool along the last axis with zeros beyond its ends, same length."""
    if pool == "none" or kernel == 1:
        return x
    shape = (1,) * (x.ndim - 1) + (kernel,)
    pad = ((0, 0),) * (x.ndim - 1) + ((kernel // 2, kernel - 1 - kernel // 2),)
    start, combine = (-jnp.inf, jax.lax.max) if pool == "max" else (0.0, jax.lax.add)
    out = jax.lax.reduce_window(x, start, combine, shape, (1,) * x.ndim, pad)
    return out if pool == "max" else out / kernel


def chunked(x: jax.Array, chunk: int) -> jax.Array:
    """Mean over aligned chunks of adjacent tokens, given to each of them; `[..., S]`."""
    if chunk == 1:
        return x
    size = x.shape[-1]
    padded = jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, -size % chunk),))
    mean = padded.reshape(*x.shape[:-1], -1, chunk).mean(-1)
    return jnp.repeat(mean, chunk, axis=-1)[..., :size]
