"""How much attention the last queries of a prompt pay to each token (SnapKV's observation window)."""

import jax
import jax.numpy as jnp

from lowrank_kv_jax.attention.blockwise import logits_of
from lowrank_kv_jax.attention.sink_logits import probabilities


def window_attention(
    q: jax.Array, k: jax.Array, lengths: jax.Array, window: int, *, scale: float, cap: float | None = None,
    sink_logits: jax.Array | None = None, sliding: int | None = None,
) -> jax.Array:
    """Attention probabilities that each kv head's tokens receive, summed over the window and the head's queries.

    Args: as `window_attention_by_query_head`.

    Returns:
        float32 `[B, K, S]`, zero beyond a row's length.
    """
    rule = {"scale": scale, "cap": cap, "sink_logits": sink_logits, "sliding": sliding}
    return window_attention_by_query_head(q, k, lengths, window, **rule).sum(2)


def window_attention_by_query_head(
    q: jax.Array, k: jax.Array, lengths: jax.Array, window: int, *, scale: float, cap: float | None = None,
    sink_logits: jax.Array | None = None, sliding: int | None = None,
) -> jax.Array:
    """Attention probabilities that tokens receive from each query head, summed over the window.

    Args:
        q: `[B, S, N, D]`, after RoPE.
        k: `[B, S, K, D]`, after RoPE.
        lengths: int32 `[B]`.
        window: last queries of each row that vote; rows that are shorter vote with all they have.
        scale, cap: as for `blockwise.logits_of`.
        sink_logits: float32 `[N]`; they take their share of the attention.
        sliding: the layer's sliding window: a query sees so many last keys, itself included; None: all before it.

    Returns:
        float32 `[B, K, N / K, S]`, zero beyond a row's length. softmax is causal and float32 (OjaKV, section 5.2).
    """
    batch, size, heads, dim = q.shape
    kv_heads = k.shape[2]
    window = min(window, size)
    begin = jnp.maximum(lengths - window, 0)
    index = begin[:, None] + jnp.arange(window)
    votes = index < lengths[:, None]
    q = jax.vmap(lambda x, i: jnp.take(x, jnp.minimum(i, size - 1), axis=0))(q, index)
    q = q.reshape(batch, window, kv_heads, heads // kv_heads, dim)
    logits = logits_of(jnp.einsum("bwkgd,bskd->bkgws", q, k, preferred_element_type=jnp.float32), scale, cap)
    slots = jnp.arange(size)[None, None, :]
    causal = slots <= index[:, :, None]
    if sliding is not None:
        causal = causal & (slots > index[:, :, None] - sliding)
    paid = probabilities(jnp.where(causal[:, None, None], logits, -jnp.inf), sink_logits, heads=(1, 2))
    return jnp.where(votes[:, None, None, :, None], paid, 0.0).sum(3)


def most_important(scores: jax.Array, counts: jax.Array, most: int) -> tuple[jax.Array, jax.Array]:
    """Indices of the highest scores and which of them count.

    Args:
        scores: `[B, S]`.
        counts: int32 `[B]`, how many tokens each row takes, at most `most`.
        most: static number of indices.

    Returns:
        Indices int32 `[B, most]`, highest score first, and float32 weights `[B, most]`, 1 for the first counts[b].
    """
    _, index = jax.lax.top_k(scores, most)
    return index, (jnp.arange(most)[None] < counts[:, None]).astype(jnp.float32)
