"""What a layer holds of its chunks: tokens, the basis of each chunk, and what decides about the next one."""

from typing import Any

import jax
import jax.numpy as jnp

from lowrank_kv_jax.segments import coded as coded_tokens
from lowrank_kv_jax.storage import precise
from lowrank_kv_jax.storage.chunk_bases import ChunkBases
from lowrank_kv_jax.storage.state import leaf, state


@state
class Chunks:
    """Which basis each coded token is read in, and what decides about the next one.

    Attributes:
        k_bases, v_bases: `[B, C, J, W, R]`; those of values by rows, which are summed over when they are expanded.
        owner: int32 `[B, S / page]`, the basis of each page.
        used: int32 `[B]`, bases stored so far.
        begun: int32 `[B]`, the slot where the open chunk began.
        missed: float32 `[B, 2, J]`, relative residuals of keys and values, summed over the open page.
        k_learned, v_learned: what the estimator knows.
    """

    k_bases: ChunkBases
    v_bases: ChunkBases
    k_learned: Any
    v_learned: Any
    owner: jax.Array = leaf("batch", "tokens", kind="indices")
    used: jax.Array = leaf("batch", kind="indices")
    begun: jax.Array = leaf("batch", kind="indices")
    missed: jax.Array = leaf("batch", None, "kv_heads", kind="moments")


@state
class ChunkedStore:
    """One layer's tokens, coded in chunks."""

    tokens: coded_tokens.Coded
    chunks: Chunks


def slots_of(store: ChunkedStore) -> jax.Array:
    """Bases that each row has room for, int32 `[B]`."""
    return jnp.full_like(store.chunks.used, store.chunks.k_bases.capacity)


def overlap_of(first: jax.Array, second: jax.Array) -> jax.Array:
    """Tr(U1^T U2 U2^T U1) / r, `[B, J]`."""
    across = precise.matmul(first.mT, second)
    return jnp.sum(across**2, axis=(-2, -1)) / first.shape[-1]


def put_page(owner: jax.Array, page: jax.Array, number: jax.Array, where: jax.Array) -> jax.Array:
    """`owner[b, page[b]] = number[b]` in the rows of `where`; pages that do not exist are left out."""

    def row(buffer, at, new, wanted):
        return buffer.at[at].set(jnp.where(wanted, new, buffer[jnp.minimum(at, buffer.shape[0] - 1)]), mode="drop")

    return jax.vmap(row)(owner, page, number, where)
