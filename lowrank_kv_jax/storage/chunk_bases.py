"""Bases of chunks: one array with a slot for each basis, whose number is fixed when the cache is made."""

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Float32, Int

from lowrank_kv_jax.storage.quantised import _LARGEST, quantise
from lowrank_kv_jax.storage.state import leaf, state, static


@state
class ChunkBases:
    """Orthonormal bases; tokens say by number which one they are read in.

    Attributes:
        codes: `[B, C, J, W, R]`, a float dtype, or int8 or float8 with `scales`.
        scales: bfloat16 `[B, C, J, 1, R]`, one for each direction; None for plain floats.
        by_rows: both are stored with their last two axes swapped, a direction in a row: XLA's CPU backend expands
            coefficients in such bases 4 times as fast, and folds queries into the others.
    """

    codes: jax.Array = leaf("batch", "chunks", "kv_heads", "width", "rank", kind="bases")
    scales: jax.Array | None = leaf("batch", "chunks", "kv_heads", None, "rank", kind="scales")
    by_rows: bool = static(default=False)

    @property
    def capacity(self) -> int:
        return self.codes.shape[1]

    def take(self, index: Int[jax.Array, "B P"]) -> Float32[jax.Array, "B P J W R"]:
        """Bases float32 `[B, P, J, W, R]` of numbers `[B, P]`."""
        take = jax.vmap(lambda buffer, i: jnp.take(buffer, i, axis=0))
        bases = take(self.codes, index).astype(jnp.float32)
        if self.scales is not None:
            bases = bases * take(self.scales, index).astype(jnp.float32)
        return bases.swapaxes(-1, -2) if self.by_rows else bases

    def part(
        self, begin: Int[jax.Array, ""] | int, count: int, dtype, by_rows: bool = False
    ) -> Float[jax.Array, "B {count} J _ _"]:
        """`count` bases from number `begin` on, `[B, count, J, W, R]`, or `by_rows` `[.., R, W]`."""
        bases = jax.lax.dynamic_slice_in_dim(self.codes, begin, count, axis=1).astype(dtype)
        if self.scales is not None:
            bases = bases * jax.lax.dynamic_slice_in_dim(self.scales, begin, count, axis=1).astype(dtype)
        return bases if by_rows == self.by_rows else bases.swapaxes(-1, -2)

    def put(
        self, index: Int[jax.Array, " B"], basis: Float[jax.Array, "B J W R"], where: Bool[jax.Array, " B"]
    ) -> "ChunkBases":
        """Store `basis` `[B, J, W, R]` as number `index` `[B]` in the rows of `where` `[B]`, in place."""
        new = store_bases(basis[:, None], self.codes.dtype.name, self.by_rows)

        def row(buffer, fresh, i, wanted):
            old = jax.lax.dynamic_slice_in_dim(buffer, i, 1, axis=0)
            return jax.lax.dynamic_update_slice_in_dim(buffer, jnp.where(wanted, fresh, old), i, axis=0)

        scales = None if self.scales is None else jax.vmap(row)(self.scales, new.scales, index, where)
        return ChunkBases(jax.vmap(row)(self.codes, new.codes, index, where), scales, self.by_rows)


def store_bases(bases: Float[jax.Array, "B C J W R"], dtype: str, by_rows: bool = False) -> ChunkBases:
    """Keep bases `[B, C, J, W, R]` as one of `quantised.BASIS_STORAGE`."""
    bases = bases.swapaxes(-1, -2) if by_rows else bases
    if dtype in _LARGEST:
        return ChunkBases(*quantise(bases, axis=-1 if by_rows else -2, dtype=dtype), by_rows)
    return ChunkBases(bases.astype(dtype), None, by_rows)
