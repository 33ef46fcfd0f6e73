"""Online-softmax attention over blocks of tokens in plain XLA: O(length) work over buffers of any capacity."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.attention.partial import AttnPartial, from_sums

MASKED = -1e30  # not -inf: a row that has seen nothing yet must not make exp(inf - inf)

# Keys or values of a block, whole or as columns that stand side by side.
Columns = jax.Array | tuple[jax.Array, ...]

# In the place of keys: their products float32 [B, J, M, S] with queries [B, J, M, Dk], M = T * G.
Products = Callable[[jax.Array], jax.Array]

# (block index) -> keys [B, J, S, Dk], values [B, J, S, Dv], visible bool [B, 1 or T, S], or where heads or the query
# heads of a head (G = N / J) see different tokens, anything that broadcasts to [B, J, T, G, S]
ReadBlock = Callable[[jax.Array | int], tuple[Columns | Products, Columns, jax.Array]]


def logits_of(products: jax.Array, scale: float, cap: float | None) -> jax.Array:
    """Logits, of any shape, of products of queries and keys: times `scale`, softly within +-`cap` where there is one."""
    logits = products * scale
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def blockwise_attention(
    q: jax.Array, read_block: ReadBlock, first: jax.Array | int, last: jax.Array | int, *, shared_heads: int,
    value_dim: int, scale: float, cap: float | None = None, tokens_last: bool = False, values_last: bool = False,
    together: int = 1,
) -> AttnPartial:
    """Attention of `q` over the blocks `first <= i < last`, each read (sliced, widened, rebuilt) only when needed.

    Args:
        q: `[B, T, N, Dk]`; its dtype is the compute dtype, accumulation is float32.
        read_block: gives a block; `J` kv heads, N a multiple of J, query heads in order of their kv head.
        first, last: block range; a traced value gives a dynamic trip count.
        shared_heads: J.
        value_dim: Dv.
        scale, cap: as for `logits_of`.
        together: blocks of a step of the loop; none waits for another, so that a CPU's cores work on several.
        tokens_last, values_last: the blocks' keys come as `[B, J, Dk, S]`, their values as `[B, J, Dv, S]`.

    Returns:
        Partial with out `[B, T, N, Dv]`.
    """
    batch, queries, heads, _ = q.shape
    product = "bjmd,bjds->bjms" if tokens_last else "bjmd,bjsd->bjms"
    per_head = heads // shared_heads
    rows = queries * per_head
    q = q.reshape(batch, queries, shared_heads, per_head, -1).swapaxes(1, 2).reshape(batch, shared_heads, rows, -1)

    def read(i):
        """Logits of a block `[B, J, M, S]`, and what sums its values `[B, J, M, Dv]` by their weights."""
        keys, values, visible = read_block(i)
        products = keys(q) if callable(keys) else _products(product, q, _parts(keys), -2 if tokens_last else -1)
        visible = visible[:, None, :, None] if visible.ndim == 3 else visible
        mask = jnp.broadcast_to(visible, (batch, visible.shape[1], queries, per_head, visible.shape[-1]))
        mask = mask.reshape(batch, visible.shape[1], rows, -1)
        # values that all heads share make one product with all rows, and no copy for each head
        values = _parts(values)
        of_heads = "bj" if values[0].shape[1] == shared_heads else "bx"
        shared = f"bjms,{of_heads}{'ds' if values_last else 'sd'}->bjmd"

        def weigh(weights):
            parts = [jnp.einsum(shared, weights, x.astype(q.dtype), preferred_element_type=jnp.float32) for x in values]
            return jnp.concatenate(parts, axis=-1)

        return jnp.where(mask, logits_of(products, scale, cap), MASKED), weigh

    def step(number, carry):
        top, total, out = carry
        at = [first + together * number + own for own in range(together)]
        blocks = [read(at[0]), *(read(jnp.minimum(i, last - 1)) for i in at[1:])]
        of_step = [blocks[0][0], *(jnp.where(i < last, x, MASKED) for i, (x, _) in zip(at[1:], blocks[1:], strict=True))]
        new_top = functools.reduce(jnp.maximum, [logits.max(-1) for logits in of_step], top)
        shrink = jnp.exp(top - new_top)
        # a row that has seen nothing must not weigh what is masked: exp(MASKED) is 0, exp(MASKED - MASKED) is not
        base = jnp.where(new_top == MASKED, 0.0, new_top)[..., None]
        total, out = total * shrink, out * shrink[..., None]
        for logits, (_, weigh) in zip(of_step, blocks, strict=True):
            weights = jnp.exp(logits - base).astype(q.dtype)  # what is summed are those that are rounded to it
            total, out = total + weights.sum(-1, dtype=jnp.float32), out + weigh(weights)
        return new_top, total, out

    carry = (
        jnp.full((batch, shared_heads, rows), MASKED, jnp.float32),
        jnp.zeros((batch, shared_heads, rows), jnp.float32),
        jnp.zeros((batch, shared_heads, rows, value_dim), jnp.float32),
    )
    steps = -((first - last) // together)
    single = isinstance(steps, int) and steps == 1
    top, total, out = step(0, carry) if single else jax.lax.fori_loop(0, steps, step, carry)

    def heads_last(x):
        x = x.reshape(batch, shared_heads, queries, per_head, *x.shape[3:])
        return x.swapaxes(1, 2).reshape(batch, queries, heads, *x.shape[4:])

    return from_sums(heads_last(top), heads_last(total), heads_last(out))


def _parts(x: Columns) -> tuple[jax.Array, ...]:
    return x if isinstance(x, tuple) else (x,)


def _products(product: str, q: jax.Array, keys: tuple[jax.Array, ...], axis: int) -> jax.Array:
    """Of queries `[B, J, M, Dk]` and all columns of the keys, which lie along `axis`: float32 `[B, J, M, S]`."""
    widths = [x.shape[axis] for x in keys]
    queries = jnp.split(q, np.cumsum(widths)[:-1], axis=-1)
    parts = [
        jnp.einsum(product, some, x.astype(q.dtype), preferred_element_type=jnp.float32)
        for some, x in zip(queries, keys, strict=True)
    ]
    return functools.reduce(jnp.add, parts)


def spread_heads(x, heads):
    """Repeat shared heads `[B, J, ...]` so that keys and values have `heads` of them."""
    return x if x.shape[1] == heads else jnp.repeat(x, heads // x.shape[1], axis=1)
