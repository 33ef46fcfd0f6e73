"""Reading a buffer block by block, from the lowest visible slot to the longest row: O(length) of any capacity."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, Shaped

from lowrank_kv_jax.storage.backend import platform
from lowrank_kv_jax.storage.positions import PerHead

# Blocks that stay in a core's cache: measured fastest on XLA's CPU backend, whose batched matmuls slow down beyond.
BLOCK = 512
FEW = 16  # queries of a decode step at most
AT_ONCE, A_TURN = 2**27, 2**26  # numbers that may be computed of all tokens together, and else of those of a loop's turn


def block_for(size: int, queries: int, numbers: int, block: int = BLOCK) -> int:
    """Tokens of a block of a buffer of `size`: `block`, but for a few queries on an accelerator all of them, or many.

    A loop whose end the lengths decide stops a GPU for its host at every turn, and what it spares is little there: of one
    query the logits are a few hundredths of the keys' bytes.

    Args:
        queries: T; 0 where tokens are summed up or changed, in float32: half as many at once.
        numbers: that are computed of a token, logits of all queries or a rebuilt key, of all rows.
    """
    if platform() == "cpu" or queries > FEW:
        return block
    if size * numbers <= (AT_ONCE if queries else A_TURN):
        return size
    return max(A_TURN // numbers // block, 1) * block


def even_block(size: int, largest: int, whole: int) -> int:
    """Tokens of each block of a buffer of `size` that steps rebuild: about equal ones, a multiple of `whole`.

    Two blocks at least where a buffer is longer than `whole`: what is rebuilt of all slots is the same at each step of a
    loop that decodes, and XLA would compute it once for all steps, of all layers, and keep it.

    Args:
        largest: what no block exceeds, a multiple of `whole`.
    """
    even = -(-size // max(-(-size // largest), 2))
    return -(-even // whole) * whole


def block_slots(
    i: Int[jax.Array, ""] | int, size: int, block: int = BLOCK
) -> tuple[Int[jax.Array, ""], Int[jax.Array, " S"], Bool[jax.Array, " S"]]:
    """Start, slots `[S]` and novelty mask `[S]` of block `i` of a buffer of `size` tokens.

    The last block of a buffer that is no multiple of the block starts earlier, so that no slice leaves the buffer; the
    mask hides what the block before it has already shown.
    """
    width = min(block, size)
    start = jnp.minimum(i * block, size - width)
    slots = start + jnp.arange(width)
    return start, slots, slots >= i * block


def slice_block(buffer: Any, start: Int[jax.Array, ""] | int, block: int = BLOCK) -> Shaped[jax.Array, "..."]:
    """Block of a `[B, J, S, R]` buffer, `[B, J, min(block, S), R]`.

    A storage that is no plain array (quantised codes, say) is read by its `read_block(start, size)`.
    """
    if hasattr(buffer, "read_block"):
        return buffer.read_block(start, min(block, buffer.shape[2]))
    return jax.lax.dynamic_slice_in_dim(buffer, start, min(block, buffer.shape[2]), axis=2)


def slice_parts(
    buffer: Any, start: Int[jax.Array, ""] | int, block: int = BLOCK
) -> tuple[Float[jax.Array, "..."], ...]:
    """The same as columns that stand side by side `[B, J, min(block, S), .]`: one array, unless the storage has
    `read_parts`, because putting them into one would cost more than a product with each. `[B, J, ., min(block, S)]` where
    `parts_are_tokens_last`."""
    if hasattr(buffer, "read_parts"):
        return buffer.read_parts(start, min(block, buffer.shape[2]))
    return (slice_block(buffer, start, block),)


def parts_are_tokens_last(buffer: Any) -> bool:
    """Whether the tokens are last in what `slice_parts` gives."""
    return getattr(buffer, "tokens_last", False)


def gather_blocks(stored: Any, starts: Int[jax.Array, "B U C"], size: int) -> Float[jax.Array, "B U C*{size} R"]:
    """Tokens `[B, U, C * size, R]` of a storage of J heads, U a multiple of J, from `starts` `[B, U, C]` on.

    Heads of the storage serve U / J units each. What would reach beyond the storage begins earlier.
    """
    batch, units, count = starts.shape
    starts = jnp.minimum(starts, stored.shape[2] - size).reshape(batch, stored.shape[1], -1)

    def blocks(own: Any, begins: jax.Array) -> jax.Array:
        alone = jax.tree.map(lambda x: x[None, None], own)
        return jax.vmap(lambda begin: slice_block(alone, begin, size)[0, 0])(begins)

    whole = hasattr(stored, "read_blocks")  # where no gather can reach
    found = stored.read_blocks(starts, size) if whole else jax.vmap(jax.vmap(blocks))(stored, starts)
    return found.reshape(batch, units, count * size, found.shape[-1])


def block_range(
    size: int, lengths: Int[jax.Array, " B"], lowest: Int[jax.Array, "..."] | None = None, block: int = BLOCK
) -> tuple[Int[jax.Array, ""] | int, Int[jax.Array, ""] | int]:
    """Blocks that hold a visible token: from the lowest visible slot to the longest row.

    Static (one block) when the buffer fits a block, else a dynamic range, so that work is O(length).
    """
    if size <= block:
        return 0, 1
    last = (jnp.max(lengths) + block - 1) // block
    first = 0 if lowest is None else jnp.maximum(jnp.min(lowest), 0) // block
    return first, last


def visible_blocks(
    tokens: Any, q_positions: Int[jax.Array, "B T"], window: int | None, block: int
) -> tuple[Int[jax.Array, ""] | int, Int[jax.Array, ""] | int]:
    """`block_range` of `CachedTokens` for queries at these positions, who see `window` tokens back, or all."""
    through, lowest = getattr(tokens.positions, "slots_through", None), None
    if window is not None and through is not None:
        first = through(jnp.min(q_positions, axis=1, keepdims=True) - window)[:, 0]
        lowest = jnp.where(tokens.lengths > 0, first, tokens.keys.shape[2])
    return block_range(tokens.keys.shape[2], tokens.lengths, lowest, block)


def visible_slots(tokens, slots, fresh, q_positions, causal, window, q_heads):
    """Which of `slots` each query may see: bool that broadcasts to `[B, J, T, G, S]`; positions `[B, 1 or J, S]`."""
    positions = tokens.positions.at(slots)
    positions = positions[:, None] if positions.ndim == 2 else positions
    mask = (fresh & (slots[None] < tokens.lengths[:, None]))[:, None, None, None, :]
    key, query = positions[:, :, None, None], q_positions[:, None, :, None, None]
    if causal:
        mask = mask & (key <= query)
    if window is not None:
        mask = mask & (key > query - window)
    if isinstance(tokens.positions, PerHead) and tokens.positions.owner is not None:
        mask = mask & tokens.positions.owned(slots, q_heads)
    return mask, positions
