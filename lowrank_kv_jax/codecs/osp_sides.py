"""Keys or values of a layer on their way into chunks, and what is learned of them."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Side(NamedTuple):
    """Keys or values.

    Attributes:
        x: `[B, J, T, W]`.
        turned: what is learned of tokens and their weights, `turned(x, weight)`.
        prior: `[J, R, W]`, tokens whose second moment is the calibrated one of a token.
    """

    x: jax.Array
    turned: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
    prior: jax.Array


def prior_tokens(basis: jax.Array, energy: jax.Array) -> jax.Array:
    return (basis.astype(jnp.float32) * jnp.sqrt(energy.astype(jnp.float32))[:, None]).mT


def as_they_are(x, weight):
    return x, jnp.broadcast_to(weight, x.shape[:-1])


def quarter_turn(width: int, dim: int) -> np.ndarray:
    """Orthogonal `[W, W]` that turns each frequency pair (i, i + D / 2) of every head by a right angle."""
    half = np.eye(dim // 2)
    return np.kron(np.eye(width // dim), np.block([[0 * half, half], [-half, 0 * half]]))


def with_quarter_turns(dim: int, x: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Tokens `[B, J, T, W]`, and the same times i, each frequency pair read as a complex number.

    What is learned from both has principal directions in twos, u and i u: one complex direction.
    """
    turned = x.astype(jnp.float32) @ quarter_turn(x.shape[-1], dim).astype(np.float32)
    weight = jnp.broadcast_to(weight, x.shape[:-1])
    return jnp.concatenate([x.astype(jnp.float32), turned], axis=-2), jnp.concatenate([weight, weight], axis=-1)


def side_by_side(x: jax.Array, groups: int) -> jax.Array:
    """Tokens `[B, J, T, W]` of tokens `[B, K, T, D]`."""
    batch, heads, tokens, dim = x.shape
    x = x.reshape(batch, groups, heads // groups, tokens, dim).swapaxes(2, 3)
    return x.reshape(batch, groups, tokens, -1)
