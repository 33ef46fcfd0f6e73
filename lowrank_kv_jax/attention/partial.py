"""Attention over a part of the tokens, and the log-sum-exp merge of disjoint parts.

Softmax attention over tokens that are split into disjoint parts is exactly the merge of the parts' partials. Two
partials over the *same* tokens may not be merged: that would add their partition functions.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp


class AttnPartial(NamedTuple):
    """Attention restricted to a set of tokens, float32.

    Attributes:
        out: `sum_i exp(s_i - lse) v_i`, `[B, T, N, D]`; zero for an empty part.
        lse: `log sum_i exp(s_i)`, `[B, T, N]`; -inf for an empty part.
    """

    out: jax.Array
    lse: jax.Array


def from_sums(top: jax.Array, total: jax.Array, out: jax.Array) -> AttnPartial:
    """The partial of an online softmax.

    Args:
        top: largest logit `[B, T, N]`, anything where no token was seen.
        total: `sum_i exp(s_i - top)`; 0 where no token was seen.
        out: `sum_i exp(s_i - top) v_i`, `[B, T, N, D]`.
    """
    some = jnp.where(total == 0, 1.0, total)
    return AttnPartial(out / some[..., None], jnp.where(total == 0, -jnp.inf, top + jnp.log(some)))


def merge_over(part: AttnPartial, axis: str) -> AttnPartial:
    """Attention over what the devices of a mesh's axis have partials of, the same on each; within `shard_map`."""
    top = jax.lax.pmax(part.lse, axis)
    top = jnp.where(jnp.isneginf(top), 0.0, top)
    weight = jnp.exp(part.lse - top)
    total, out = jax.lax.psum((weight, weight[..., None] * part.out), axis)
    return AttnPartial(out / jnp.where(total == 0, 1.0, total)[..., None], jnp.log(total) + top)


def merge(parts: Sequence[AttnPartial], kv_heads: int | None = None) -> AttnPartial:
    """Attention over the union of disjoint parts.

    Args:
        parts: at least one partial, all of one shape. Empty parts (lse = -inf) change nothing.
        kv_heads: K, where kernels made the parts head by head: on a GPU XLA then makes one program of a merge and of
            the merge of splits before it.

    Returns:
        lse = logsumexp_j lse_j and out = sum_j exp(lse_j - lse) out_j, float32.

    Raises:
        ValueError: `parts` is empty.
    """
    if not parts:
        raise ValueError("merge needs at least one partial")
    if len(parts) == 1:
        return parts[0]
    if kv_heads is not None:
        whole = merge([AttnPartial(*(_by_kv_head(x, kv_heads) for x in part)) for part in parts])
        return AttnPartial(*(x.reshape(*x.shape[:2], -1, *x.shape[4:]) for x in whole))
    top = parts[0].lse
    for part in parts[1:]:
        top = jnp.maximum(top, part.lse)
    top = jnp.where(jnp.isneginf(top), 0.0, top)  # all parts empty: exp(-inf - 0) = 0, not NaN
    weights = [jnp.exp(part.lse - top) for part in parts]
    total = sum(weights[1:], weights[0])
    out = sum((w[..., None] * p.out for w, p in zip(weights, parts, strict=True)), jnp.zeros(()))
    return AttnPartial(out / jnp.where(total == 0, 1.0, total)[..., None], jnp.log(total) + top)


def _by_kv_head(x: jax.Array, kv_heads: int) -> jax.Array:
    """`[B, T, K, G, ..]` of `[B, T, N, ..]`."""
    return x.reshape(*x.shape[:2], kv_heads, -1, *x.shape[3:])
