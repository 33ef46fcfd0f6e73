"""Original token positions of a segment: as runs of consecutive tokens, or one by one where each head kept its own."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int, Int32

from lowrank_kv_jax.storage.state import leaf, state, static


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

    def at(self, slots: Int[jax.Array, " S"]) -> Int32[jax.Array, "B S"]:
        """Positions int32 `[B, S]` of `slots` `[S]`."""
        behind = slots[None, None, :] >= self.start[:, :, None]
        return slots[None, :] + jnp.sum(jnp.where(behind, self.jump[:, :, None], 0), axis=1)

    def of_each(self, slot: Int[jax.Array, " B"]) -> Int32[jax.Array, " B"]:
        """Position int32 `[B]` of one slot of each row."""
        gaps = range(self.start.shape[1])  # a sum along an axis would be a program of its own
        return slot + sum(jnp.where(slot >= self.start[:, p], self.jump[:, p], 0) for p in gaps)

    def pieces(self) -> tuple[Int32[jax.Array, "B P"], Int32[jax.Array, "B P"]]:
        """Runs of consecutive tokens in order: first slots and offsets (position - slot), int32 `[B, P + 1]` each."""
        first, offset = self._pieces()
        return jnp.stack(first, axis=1), jnp.stack(offset, axis=1)

    def _pieces(self) -> tuple[list[jax.Array], list[jax.Array]]:
        return pieces_of(*([x[:, p] for p in range(x.shape[1])] for x in (self.start, self.jump)))

    def slots_through(self, position: Int[jax.Array, "B T"]) -> Int32[jax.Array, "B T"]:
        """How many slots hold a token at or before `position` `[B, T]`: int32 `[B, T]`.

        Positions rise from slot to slot, so these are the first ones.
        """
        first, offset = self._pieces()
        sizes = [end - begin for begin, end in zip(first, [*first[1:], jnp.iinfo(jnp.int32).max], strict=True)]
        seen = (
            jnp.clip(position + 1 - (begin + ahead)[:, None], 0, size[:, None])
            for begin, ahead, size in zip(first, offset, sizes, strict=True)
        )
        return sum(seen, jnp.zeros_like(position))

    def skip(self, run: int, tokens: Int[jax.Array, " B"]) -> "Runs":
        """Widen gap number `run` by `tokens` `[B]`."""
        return Runs(self.start, self.jump.at[:, run].add(tokens))

    def from_slot(self, begin: int | Int[jax.Array, ""]) -> "Runs":
        """Positions of the slots from `begin` on, counted from 0."""
        ones = jnp.ones_like(self.start[:, :1])
        return Runs(
            jnp.concatenate([0 * ones, self.start - begin], axis=1),
            jnp.concatenate([begin * ones, self.jump], axis=1),
        )

    of_device = from_slot


def pieces_of(start: list[jax.Array], jump: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
    """What `Runs.pieces` are, by run, of gaps one by one, int32 of any shape: scalars in a kernel, or `[B]`, of which a
    sort, or a sum along an axis, would be a program of its own."""
    start = [jnp.maximum(each, 0) for each in start]
    none = jnp.zeros_like(start[0])

    def earlier(q: int, p: int) -> jax.Array:
        return start[q] <= start[p] if q < p else start[q] < start[p]

    places = range(len(start))
    place = [sum((earlier(q, p).astype(jnp.int32) for q in places if q != p), none) for p in places]
    ordered = [sum((jnp.where(place[p] == at, start[p], 0) for p in places), none) for at in places]
    offset = [sum((jnp.where(start[q] <= first, jump[q], 0) for q in places), none) for first in ordered]
    return [none, *ordered], [none, *offset]


def owner_dtype(kv_heads: int) -> Any:
    """Of the numbers of so many kv heads, a byte each where that holds them."""
    return jnp.int8 if kv_heads <= 128 else jnp.int16


@state
class PerHead:
    """Positions of tokens that each head selected for itself.

    Attributes:
        position: int32 `[B, J, S]`.
        owner: `[B, 1, S]` of `owner_dtype`, the kv head to which a slot belongs where the tokens of all heads lie packed
            in one buffer (J = 1); None where every head has a buffer of its own, or all heads share their tokens.
        kv_heads: K.
    """

    position: jax.Array = leaf("batch", "kv_heads", "tokens", kind="indices")
    owner: jax.Array | None = leaf("batch", None, "tokens", kind="indices")
    kv_heads: int = static()

    def at(self, slots: Int[jax.Array, " S"]) -> Int32[jax.Array, "B J S"]:
        """Positions int32 `[B, J, S]` of `slots` `[S]`."""
        return jnp.take(self.position, slots, axis=2)

    def of_device(self, begin: Int[jax.Array, ""]) -> "PerHead":
        """Of the slots from `begin` on, which alone are here: they are cut as the tokens are."""
        del begin
        return self

    def with_slots(self, size: int) -> "PerHead":
        """Positions of more slots."""
        def more(x):
            return None if x is None else jnp.pad(x, ((0, 0), (0, 0), (0, size - x.shape[2])))

        return PerHead(more(self.position), more(self.owner), self.kv_heads)

    def owned(self, slots: Int[jax.Array, " S"], q_heads: int) -> Bool[jax.Array, "B 1 1 {q_heads} S"] | None:
        """Which query heads read `slots` `[S]`: bool `[B, 1, 1, N, S]`, or None where all do."""
        if self.owner is None:
            return None
        reader = (jnp.arange(q_heads) // (q_heads // self.kv_heads)).astype(self.owner.dtype)
        return jnp.take(self.owner, slots, axis=2)[:, :, None, None] == reader[:, None]


@state
class OfPages(PerHead):
    """Positions of the tokens of pages, which a kernel that is told the pages counts by itself.

    Attributes:
        runs: of all tokens.
    """

    runs: Runs
