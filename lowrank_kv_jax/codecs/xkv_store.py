"""What xKV holds of a group's tokens."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lowrank_kv_jax.attention.spec import Taps
from lowrank_kv_jax.codecs.prompt_means import mean_of, without
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
        k_mean: `[B, 1, G * K * D]`, layer by layer, which keys are coded without; None: there is none.
    """

    tokens: coded_tokens.Coded
    k_basis: jax.Array | ScaledBasis = leaf("batch", "kv_heads", "width", "rank", kind="bases")
    v_basis: jax.Array | ScaledBasis = leaf("batch", "kv_heads", "width", "rank", kind="bases")
    k_steps: Steps | None
    v_steps: Steps | None
    k_mean: jax.Array | None = leaf("batch", "kv_heads", "width", kind="bases")


def side_by_side(
    tokens: Sequence[Any], side: str, weight: jax.Array | None = None, k_mean: jax.Array | None = None
) -> jax.Array:
    """Keys ("k") or values ("v") of G layers' tokens side by side, float32 `[B, S, 1, G * K * D]`.

    Args:
        tokens: taps or tokens of each layer, `[B, S, K, D]`.
        weight: `[B, S]`, what they are multiplied by.
        k_mean: what keys are taken without, before that.

    Raises:
        ValueError: the layers differ in shape.
    """
    parts = [getattr(one, dict(SIDES)[side]) for one in tokens]
    shapes = [x.shape for x in parts]
    if len(set(shapes)) > 1:
        raise ValueError(f"the layers of a group must have one shape, got {shapes}: use a smaller group")
    x = jnp.concatenate([x.reshape(*x.shape[:2], 1, -1) for x in parts], axis=-1).astype(jnp.float32)
    x = without(x, k_mean if side == "k" else None)
    return x if weight is None else x * weight[:, :, None, None]


def key_mean_of(taps: Sequence[Taps], weight: jax.Array, dtype: str) -> jax.Array:
    """Of G layers side by side, of the tokens of weight `[B, S]`: `[B, 1, G * K * D]`."""
    return mean_of(side_by_side(taps, "k"), weight, dtype)
