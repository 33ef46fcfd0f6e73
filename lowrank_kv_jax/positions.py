"""Original token positions of a segment, stored as runs of consecutive tokens."""

import jax
import jax.numpy as jnp

from lowrank_kv_jax.state import leaf, state


@state
class Runs:
    """Positions of tokens that sit in order with a few gaps between them.

    The token in slot `i` of row `b` has position `i + sum_p jump[b, p] * (i >= start[b, p])`.

    Attributes:
        start: int32 `[B, P]`, slots at which a gap lies before the token.
        jump: int32 `[B, P]`, tokens that are missing there.
    """

    start: jax.Array = leaf("batch", None, kind="indices")
    jump: jax.Array = leaf("batch", None, kind="indices")

    def at(self, slots: jax.Array) -> jax.Array:
        """Positions int32 `[B, S]` of `slots` `[S]`."""
        behind = slots[None, None, :] >= self.start[:, :, None]
        return slots[None, :] + jnp.sum(jnp.where(behind, self.jump[:, :, None], 0), axis=1)

    def skip(self, run: int, tokens: jax.Array) -> "Runs":
        """Widen gap number `run` by `tokens` `[B]`."""
        return Runs(self.start, self.jump.at[:, run].add(tokens))

    def from_slot(self, begin: int) -> "Runs":
        """Positions of the slots from `begin` on, counted from 0."""
        ones = jnp.ones_like(self.start[:, :1])
        return Runs(
            jnp.concatenate([0 * ones, self.start - begin], axis=1),
            jnp.concatenate([begin * ones, self.jump], axis=1),
        )
