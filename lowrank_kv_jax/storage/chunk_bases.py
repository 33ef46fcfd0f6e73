"""Bases of chunks: one array with a slot for each basis, whose number is fixed when the cache is made."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Float32, Int, Integer

from lowrank_kv_jax.storage.quantised import _LARGEST, quantise
from lowrank_kv_jax.storage.state import leaf, state, static


@state
class ChunkBases:
    """Orthonormal bases; tokens say by number which one they are read in.

    Attributes:
        codes: `[B, C, J, W, R]`, a float dtype, or int8 or float8 with `scales`. Where each column is of one head alone,
            the channels of that head, `[B, C, 1, D, R]`.
        scales: bfloat16 `[B, C, J, 1, R]`, one for each direction; None for plain floats.
        heads: uint8 `[B, R]`, the head of each column where each is of one alone, head after head; None otherwise. Such
            bases are read as the block-diagonal ones of all heads, J = 1 and W = K * D.
        by_rows: both are stored with their last two axes swapped, a direction in a row: XLA's CPU backend expands
            coefficients in such bases 4 times as fast, and folds queries into the others.
        kv_heads: K, where there are `heads`.
    """

    codes: jax.Array = leaf("batch", "chunks", "kv_heads", "width", "rank", kind="bases")
    scales: jax.Array | None = leaf("batch", "chunks", "kv_heads", None, "rank", kind="scales")
    heads: jax.Array | None = leaf("batch", "rank", kind="indices")
    by_rows: bool = static(default=False)
    kv_heads: int = static(default=1)

    @property
    def capacity(self) -> int:
        return self.codes.shape[1]

    def take(self, index: Int[jax.Array, "B P"]) -> Float32[jax.Array, "B P J W R"]:
        """Bases float32 `[B, P, J, W, R]` of numbers `[B, P]`."""
        take = jax.vmap(lambda buffer, i: jnp.take(buffer, i, axis=0))
        bases = take(self.codes, index).astype(jnp.float32)
        if self.scales is not None:
            bases = bases * take(self.scales, index).astype(jnp.float32)
        return self._side_by_side(bases.swapaxes(-1, -2) if self.by_rows else bases)

    def part(
        self, begin: Int[jax.Array, ""] | int, count: int, dtype, by_rows: bool = False
    ) -> Float[jax.Array, "B {count} J _ _"]:
        """`count` bases from number `begin` on, `[B, count, J, W, R]`, or `by_rows` `[.., R, W]`."""
        bases = jax.lax.dynamic_slice_in_dim(self.codes, begin, count, axis=1).astype(dtype)
        if self.scales is not None:
            bases = bases * jax.lax.dynamic_slice_in_dim(self.scales, begin, count, axis=1).astype(dtype)
        if self.heads is not None:
            bases = self._side_by_side(bases.swapaxes(-1, -2) if self.by_rows else bases)
            return bases.swapaxes(-1, -2) if by_rows else bases
        return bases if by_rows == self.by_rows else bases.swapaxes(-1, -2)

    def put(
        self, index: Int[jax.Array, " B"], basis: Float[jax.Array, "B J W R"], where: Bool[jax.Array, " B"]
    ) -> "ChunkBases":
        """Store `basis` `[B, J, W, R]` as number `index` `[B]` in the rows of `where` `[B]`, in place."""
        new = store_bases(basis[:, None], self.codes.dtype.name, self.by_rows, self.heads, self.kv_heads)

        def row(buffer, fresh, i, wanted):
            old = jax.lax.dynamic_slice_in_dim(buffer, i, 1, axis=0)
            return jax.lax.dynamic_update_slice_in_dim(buffer, jnp.where(wanted, fresh, old), i, axis=0)

        scales = None if self.scales is None else jax.vmap(row)(self.scales, new.scales, index, where)
        return dataclasses.replace(self, codes=jax.vmap(row)(self.codes, new.codes, index, where), scales=scales)

    def without(self, index: Int[jax.Array, " B"], where: Bool[jax.Array, " B"]) -> "ChunkBases":
        """The bases behind number `index` `[B]` one number further in front, in the rows of `where` `[B]`."""
        numbers = jnp.arange(self.capacity)
        behind = (numbers > index[:, None]) & where[:, None]
        source = jnp.minimum(numbers + behind, self.capacity - 1)
        take = jax.vmap(lambda buffer, i: jnp.take(buffer, i, axis=0))
        scales = None if self.scales is None else take(self.scales, source)
        return dataclasses.replace(self, codes=take(self.codes, source), scales=scales)

    def _side_by_side(self, bases: jax.Array) -> jax.Array:
        """Bases `[B, P, 1, D, R]` of columns that are of one head each as `[B, P, 1, K * D, R]`; others as they are."""
        if self.heads is None:
            return bases
        hot = jax.vmap(lambda own: hot_columns(own, self.kv_heads))(self.heads)
        blocks = bases * hot[:, None, :, None].astype(bases.dtype)
        return blocks.reshape(*bases.shape[:2], 1, -1, bases.shape[-1])


def hot_columns(heads: Integer[jax.Array, " R"], kv_heads: int) -> Float32[jax.Array, "{kv_heads} R"]:
    """1 where a column is of a head, `[K, R]`."""
    return (heads[None] == jnp.arange(kv_heads)[:, None]).astype(jnp.float32)


def store_bases(
    bases: Float[jax.Array, "B C J W R"], dtype: str, by_rows: bool = False,
    heads: Integer[jax.Array, "B R"] | None = None, kv_heads: int = 1,
) -> ChunkBases:
    """Keep bases `[B, C, J, W, R]` as one of `quantised.BASIS_STORAGE`.

    Args:
        heads: the head of each column of block-diagonal bases of all heads, J = 1; what other heads have is left out.
    """
    if heads is not None:
        hot = jax.vmap(lambda own: hot_columns(own, kv_heads))(heads)
        blocks = bases.reshape(*bases.shape[:2], kv_heads, -1, bases.shape[-1])
        bases = jnp.sum(blocks * hot[:, None, :, None], axis=2, keepdims=True)
    bases = bases.swapaxes(-1, -2) if by_rows else bases
    if dtype in _LARGEST:
        return ChunkBases(*quantise(bases, axis=-1 if by_rows else -2, dtype=dtype), heads, by_rows, kv_heads)
    return ChunkBases(bases.astype(dtype), None, heads, by_rows, kv_heads)
