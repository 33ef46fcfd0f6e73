"""How far logits are off where keys are: what a residual of keys does not tell, for queries see some directions only."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float32, Int

from lowrank_kv_jax.attention.rope import rope_angles, rotate
from lowrank_kv_jax.attention.spec import AttentionSpec

MOST_QUERIES = 512


def logit_error(
    spec: AttentionSpec, rope: str, q: Float[jax.Array, "T N D"], error: Float[jax.Array, "S K D"],
    q_positions: Int[np.ndarray, " T"], positions: Int[np.ndarray, " S"],
) -> np.ndarray:
    """Root mean square error of logits, in nats, of each kv head `[K]`: over all pairs of a query and a key before it.

    Args:
        q: queries after RoPE, of which at most `MOST_QUERIES`, evenly spaced, are asked.
        error: keys less what stands for them, as they are coded.
        q_positions, positions: of the queries, and of the keys.
        rope: the side of RoPE on which keys are coded, "pre" or "post".
    """
    every = max(1, -(-len(q) // MOST_QUERIES))
    error = jnp.asarray(error, jnp.float32)
    if rope == "pre" and spec.rope is not None:
        error = rotate(error, *rope_angles(spec.rope, jnp.asarray(positions)[:, None]))
    found = _mean_squares(jnp.asarray(q[::every], jnp.float32), error, q_positions[::every], positions)
    return np.sqrt(np.asarray(found, np.float64)) * spec.scale


@jax.jit
def _mean_squares(
    q: Float[jax.Array, "T N D"], error: Float[jax.Array, "S K D"], q_positions: Int[jax.Array, " T"],
    positions: Int[jax.Array, " S"],
) -> Float32[jax.Array, " K"]:
    before = positions[None] <= q_positions[:, None]

    def of_head(q, error):
        squares = jnp.where(before, jnp.einsum("tgd,sd->gts", q, error) ** 2, 0.0)
        return jnp.sum(squares) / jnp.maximum(jnp.sum(before) * q.shape[1], 1)

    by_head = q.reshape(len(q), error.shape[1], -1, q.shape[-1]).swapaxes(0, 1)
    return jax.lax.map(lambda own: of_head(*own), (by_head, error.swapaxes(0, 1)))
