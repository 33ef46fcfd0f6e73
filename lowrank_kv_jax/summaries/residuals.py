"""What the moments of the evicted tokens do not say of another one."""

import jax
import jax.numpy as jnp

from lowrank_kv_jax.summaries.moments import EvictedMoments, affine_model


def residual_norms(
    moments: EvictedMoments, k: jax.Array, v: jax.Array, owners: jax.Array | None, scale: float
) -> jax.Array:
    """||v_j - v_bar - S~ k_j / (n_e sqrt d)|| (equation 10); ||v_j|| where nothing was evicted yet.

    Args:
        k, v: `[B, J, S, D]`, J = K, or J = 1 with `owners`.
        owners: int `[B, 1, S]`, the head of each token; None where every head has its own.
        scale: 1 / sqrt d.

    Returns:
        float32 `[B, J, S]`.
    """
    mean, slope = affine_model(moments, scale)
    k, v = k.astype(jnp.float32), v.astype(jnp.float32)
    if owners is None:
        predicted = mean[:, :, None]
        if slope is not None:
            predicted = predicted + jnp.einsum("bkde,bkse->bksd", slope, k)
        return jnp.linalg.norm(v - predicted, axis=-1)
    predicted = mean[:, None]
    if slope is not None:  # what every head would predict, in one product
        predicted = predicted + jnp.einsum("bse,bkde->bskd", k[:, 0], slope)
    own = predicted[:, :, 0]
    for head in range(1, mean.shape[1]):
        own = jnp.where((owners[:, 0] == head)[..., None], predicted[:, :, head], own)
    return jnp.linalg.norm(v - own[:, None], axis=-1)
