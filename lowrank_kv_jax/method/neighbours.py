"""Scores that neighbours lend each other, among candidates between which tokens are missing already."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float32, Int


class Neighbours(NamedTuple):
    """How neighbours in the text share scores. What was dropped between them scores zero.

    Attributes:
        pool, kernel: "avg", "max" or "none" over `kernel` tokens.
        chunk: adjacent tokens whose mean each of them gets.
    """

    pool: str = "none"
    kernel: int = 1
    chunk: int = 1

    def shared(
        self, votes: Float32[jax.Array, "B J S"], position: Int[jax.Array, "B J S"],
        owner: Int[jax.Array, "B 1 S"] | None, valid: Bool[jax.Array, "B J S"],
    ) -> Float32[jax.Array, "B J S"]:
        """Scores `[B, J, S]` from votes of candidates, in whatever order they and free slots lie."""
        whose = jnp.zeros_like(position) if owner is None else owner
        order = jnp.lexsort((position, whose, ~valid))  # each head's by position, free slots behind all

        def arranged(x):
            return jnp.take_along_axis(x, order, axis=2)

        owner = None if owner is None else arranged(owner)
        scores = self._in_order(arranged(votes), arranged(position), owner, arranged(valid))
        return jnp.take_along_axis(scores, jnp.argsort(order, axis=2), axis=2)

    def _in_order(self, votes, position, owner, valid):
        """The same of candidates in order of their positions, packed ones head after head."""
        votes = jnp.where(valid, votes, 0.0)
        if self.pool != "none" and self.kernel > 1:
            left, right = self.kernel // 2, self.kernel - 1 - self.kernel // 2
            near = [
                jnp.where(there & (at >= position - left) & (at <= position + right), x, 0.0)
                for x, at, there in _around(votes, position, owner, valid, left, right)
            ]
            votes = jnp.stack(near).max(0) if self.pool == "max" else sum(near[1:], near[0]) / self.kernel
        if self.chunk > 1:
            total, count, reach = jnp.zeros_like(votes), jnp.zeros_like(votes), self.chunk - 1
            for x, at, there in _around(votes, position, owner, valid, reach, reach):
                mine = there & (at // self.chunk == position // self.chunk)
                total, count = total + jnp.where(mine, x, 0.0), count + mine
            votes = total / jnp.maximum(count, 1.0)
        return votes


def _around(votes, position, owner, valid, left: int, right: int):
    """Votes, positions and whether there is one, of the slots up to `left` before each slot and `right` behind it."""
    for by in range(-left, right + 1):
        there = _shifted(valid, by)
        if owner is not None:
            there = there & (_shifted(owner, by) == owner)
        yield _shifted(votes, by), _shifted(position, by), there


def _shifted(x: jax.Array, by: int) -> jax.Array:
    """What stands `by` slots behind each slot `[B, J, S]`; zero beyond the ends."""
    size, by = x.shape[2], max(min(by, x.shape[2]), -x.shape[2])
    padded = jnp.pad(x, ((0, 0), (0, 0), (max(-by, 0), max(by, 0))))
    return padded[:, :, max(by, 0) : max(by, 0) + size]
