"""Keys or values of a layer on their way into chunks, and what is learned of them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.storage import precise
from lowrank_kv_jax.storage.chunk_bases import hot_columns


class Side(NamedTuple):
    """Keys or values.

    Attributes:
        x: `[B, J, T, W]`.
        prior: `[J, R, W]`, tokens whose second moment is the calibrated one of a token; of each head where it has a rank
            of its own, `[K, R, D]`.
        columns: that an estimator is asked for.
        turn: `quarter_turn` of the width, where bases rotate; None otherwise.
        heads: int `[R]`, the head of each column, where every head has a rank of its own; None otherwise. Then J = 1, and
            estimators learn head by head.
        kv_heads: K.
    """

    x: jax.Array
    prior: jax.Array
    columns: int
    turn: np.ndarray | None
    heads: jax.Array | None
    kv_heads: int

    def turned(self, x: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Tokens `[B, J, T, W]` and their weights as they are learned: with a turn, the same times i beside them.

        What is learned from both has principal directions in twos, u and i u: one complex direction.
        """
        weight = jnp.broadcast_to(weight, x.shape[:-1])
        if self.turn is None:
            return x, weight
        x = x.astype(jnp.float32)
        return jnp.concatenate([x, precise.matmul(x, self.turn)], axis=-2), jnp.concatenate([weight, weight], axis=-1)

    def seen(self, x: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        """As `turned`, of tokens as they are coded, head by head where heads are learned so."""
        if self.heads is not None:
            x = x.reshape(*x.shape[:3], self.kv_heads, -1)[:, 0].swapaxes(1, 2)
        return self.turned(x, weight)

    def moment(self, coded: jax.Array) -> jax.Array:
        """A second moment as estimators would have it, of that of coded tokens `[B, J, W, W]`."""
        if self.turn is not None:
            return coded + precise.matmul(precise.matmul(self.turn.T, coded), self.turn)
        if self.heads is None:
            return coded
        blocks = coded.reshape(len(coded), self.kv_heads, -1, self.kv_heads, coded.shape[-1] // self.kv_heads)
        return jnp.moveaxis(jnp.diagonal(blocks, axis1=1, axis2=3), -1, 1)

    def joined(self, basis: jax.Array) -> jax.Array:
        """What an estimator gave, `[B, J, W, R]`, as tokens are coded in it: heads side by side, block by block."""
        if self.heads is None:
            return basis
        first = jnp.sum(self.heads[:, None] > self.heads[None], axis=1)  # columns of the heads before
        own = jnp.arange(len(self.heads)) - first
        columns = jnp.moveaxis(basis[:, self.heads, :, own], 0, -1)  # the advanced axes come first
        blocks = columns[:, None] * hot_columns(self.heads, self.kv_heads)[:, None]
        return blocks.reshape(len(basis), 1, -1, len(self.heads))

    def energies(self, x: jax.Array, c: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Squared norms of tokens `[B, J, T, W]` and of their coefficients, head by head where heads have their ranks."""
        if self.heads is None:
            return jnp.sum(x * x, axis=-1), jnp.sum(c * c, axis=-1)
        total = jnp.sum(x.reshape(*x.shape[:3], self.kv_heads, -1) ** 2, axis=-1)
        kept = precise.matmul(jnp.square(c), hot_columns(self.heads, self.kv_heads).T)
        return total[:, 0].swapaxes(1, 2), kept[:, 0].swapaxes(1, 2)


def prior_tokens(basis: jax.Array, energy: jax.Array, heads: jax.Array | None, kv_heads: int) -> jax.Array:
    """`Side.prior` of calibrated bases `[J, W, R]` and their energies `[J, R]`."""
    tokens = (basis.astype(jnp.float32) * jnp.sqrt(jnp.maximum(energy.astype(jnp.float32), 0))[:, None]).mT
    if heads is None:
        return tokens
    return tokens.reshape(tokens.shape[1], kv_heads, -1).swapaxes(0, 1)


def column_heads(basis: jax.Array, kv_heads: int) -> jax.Array:
    """The head of each column of a block-diagonal basis `[1, K * D, R]`, int32 `[R]`; they come head after head."""
    blocks = jnp.square(basis[0].astype(jnp.float32)).reshape(kv_heads, -1, basis.shape[-1])
    return jnp.argmax(jnp.sum(blocks, axis=1), axis=0).astype(jnp.int32)


def quarter_turn(width: int, dim: int) -> np.ndarray:
    """Orthogonal `[W, W]` that turns each frequency pair (i, i + D / 2) of every head by a right angle."""
    half = np.eye(dim // 2)
    return np.kron(np.eye(width // dim), np.block([[0 * half, half], [-half, 0 * half]])).astype(np.float32)


def side_by_side(x: jax.Array, groups: int) -> jax.Array:
    """Tokens `[B, J, T, W]` of tokens `[B, K, T, D]`."""
    batch, heads, tokens, dim = x.shape
    x = x.reshape(batch, groups, heads // groups, tokens, dim).swapaxes(2, 3)
    return x.reshape(batch, groups, tokens, -1)
