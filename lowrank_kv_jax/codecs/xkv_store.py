"""What xKV holds of a group's tokens."""

import jax
import jax.numpy as jnp

from lowrank_kv_jax.segments import coded as coded_tokens
from lowrank_kv_jax.storage.quantised import ScaledBasis
from lowrank_kv_jax.storage.state import leaf, state
from lowrank_kv_jax.storage.steps import Steps

SIDES = (("k", "k_pre"), ("v", "v"))
"""What is coded, and the tap that it is."""

@state
class XKVStore:
    """The coded tokens of a group of G layers.

    Attributes:
        tokens: coefficients `[B, 1, S, R]` that all layers share.
        k_basis, v_basis: `[B, 1, G * K * D, R]`, layer by layer, the B_l of the paper one below the other.
        k_steps, v_steps: what codes count in where components have bits of their own; None otherwise.
    """

    tokens: coded_tokens.Coded
    k_basis: jax.Array | ScaledBasis = leaf("batch", "kv_heads", "width", "rank", kind="bases")
    v_basis: jax.Array | ScaledBasis = leaf("batch", "kv_heads", "width", "rank", kind="bases")
    k_steps: Steps | None
    v_steps: Steps | None


def side_by_side(parts: list[jax.Array], weight: jax.Array | None = None) -> jax.Array:
    """Tokens float32 `[B, S, 1, G * K * D]` of tokens `[B, S, K, D]` of G layers, times `weight` `[B, S]` if given.

    Raises:
        ValueError: the layers differ in shape.
    """
    shapes = [x.shape for x in parts]
    if len(set(shapes)) > 1:
        raise ValueError(f"the layers of a group must have one shape, got {shapes}: use a smaller group")
    x = jnp.concatenate([x.reshape(*x.shape[:2], 1, -1) for x in parts], axis=-1).astype(jnp.float32)
    return x if weight is None else x * weight[:, :, None, None]
