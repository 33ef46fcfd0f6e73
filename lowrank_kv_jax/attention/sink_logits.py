"""Sink logits (gpt-oss): a learnt logit of each query head that joins the softmax and carries no value.

Attention with one is attention over one more token whose value is zero, seen by every query: one more partial, merged
behind the others. Codecs, summaries and kernels know nothing of it. The first tokens of a cache, which methods call
its sinks, are another thing.
"""

import jax
import jax.numpy as jnp

from lowrank_kv_jax.attention.partial import AttnPartial, merge


def with_sink(part: AttnPartial, sink_logits: jax.Array | None) -> AttnPartial:
    """Attention over the tokens of `part`, out `[B, T, N, D]`, and a sink for each query head.

    Args:
        sink_logits: float32 `[N]`, one for each query head; None where the model has none.

    Returns:
        float32: out shrinks by the sink's share, lse `[B, T, N]` grows by it; exp(s - lse) are the true probabilities.
    """
    if sink_logits is None:
        return part
    return merge([part, AttnPartial(jnp.zeros(1), jnp.broadcast_to(sink_logits, part.lse.shape))])


def probabilities(logits: jax.Array, sink_logits: jax.Array | None, heads: tuple[int, ...]) -> jax.Array:
    """Softmax of float32 `logits` over the last axis, of the same shape; with sinks it adds up to less than one.

    Args:
        sink_logits: as for `with_sink`.
        heads: axes of `logits` whose sizes multiply to N, in the order of the query heads.
    """
    if sink_logits is None:
        return jax.nn.softmax(logits, axis=-1)
    own = sink_logits.reshape([size if axis in heads else 1 for axis, size in enumerate(logits.shape)])
    top = jax.lax.stop_gradient(jnp.maximum(logits.max(-1, keepdims=True), own))
    weights = jnp.exp(logits - top)
    return weights / (weights.sum(-1, keepdims=True) + jnp.exp(own - top))
