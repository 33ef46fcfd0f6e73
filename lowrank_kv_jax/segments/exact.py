"""Tokens kept exactly: a pinned prefix (sinks), then a tail of recent tokens from which the oldest can be flushed."""

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from lowrank_kv_jax.attention.partial import AttnPartial
from lowrank_kv_jax.pallas_kernels.append_token import append_token
from lowrank_kv_jax.pallas_kernels.append_token.buffers import Buffers
from lowrank_kv_jax.pallas_kernels.coefficient_attention import attend_to
from lowrank_kv_jax.storage.bits import Bits
from lowrank_kv_jax.storage.block_reads import slice_block
from lowrank_kv_jax.storage.cache_dtype import narrow
from lowrank_kv_jax.storage.cached_tokens import Beside, CachedTokens
from lowrank_kv_jax.storage.eight_bits import EightBits, eight_bits_of
from lowrank_kv_jax.storage.positions import Runs
from lowrank_kv_jax.storage.state import leaf, state, static, take_tokens, write_tokens


@state
class Exact:
    """Exact keys (after RoPE) and values.

    Attributes:
        k, v: `[B, K, S, D]`, in 8 bits `EightBits`; v has no channels where the keys are the values (latent attention).
        length: int32 `[B]`, tokens held by each row.
        positions: two gaps: before the tokens that were the prompt's last, and before those that came after.
    """

    k: jax.Array = leaf("batch", "kv_heads", "end_tokens", "head_dim", kind="exact")
    v: jax.Array = leaf("batch", "kv_heads", "end_tokens", "head_dim", kind="exact")
    length: jax.Array = leaf("batch", kind="indices")
    positions: Runs


class Flushed(NamedTuple):
    """Tokens that leave the tail: k, v `[B, K, T, D]`, positions `[B, T]`, valid counts `[B]`."""

    k: jax.Array
    v: jax.Array
    positions: jax.Array
    counts: jax.Array


def empty_exact(
    batch: int, kv_heads: int, size: int, head_dim: int, dtype, gaps: tuple[int, int], value_dim: int | None = None,
    bits: int | None = None,
) -> Exact:
    """An empty segment of `size` slots; tokens may be missing before the slots `gaps`; `bits` as `Ends` has it."""
    buffer = jnp.zeros((batch, kv_heads, size, head_dim), dtype)
    values = jnp.zeros((batch, kv_heads, size, head_dim if value_dim is None else value_dim), dtype)
    if bits == 8:
        buffer, values = (eight_bits_of(x, dtype) for x in (buffer, values))
    start = jnp.broadcast_to(jnp.asarray(gaps, jnp.int32), (batch, 2))
    none = jnp.zeros((batch,), jnp.int32)
    return Exact(buffer, values, none, Runs(start, jnp.zeros((batch, 2), jnp.int32)))


def hold_prompt(
    segment: Exact, k: jax.Array, v: jax.Array, lengths: jax.Array, sinks: int, recent: int,
    left_out: jax.Array | None = None,
) -> Exact:
    """Fill an empty segment with the first `sinks` and the last `recent` tokens of each row.

    Args:
        segment: of at least min(sinks + recent, S) slots, its first gap at `sinks`.
        k, v: prompt `[B, S, K, D]`, padded on the right.
        lengths: int32 `[B]`.
        left_out: int32 `[B]`, tokens between the two, where they are fewer than all but the `sinks` and `recent` that
            there is room for.
    """
    size = min(sinks + recent, k.shape[1])
    left_out = jnp.maximum(lengths - sinks - recent, 0) if left_out is None else left_out
    k, v = (x.swapaxes(1, 2) for x in (k, v))
    if sinks < size:
        tail = (sinks + left_out, size - sinks)
        k, v = (jnp.concatenate([x[:, :, :sinks], take_tokens(x, *tail)], axis=2) for x in (k, v))
    else:
        k, v = k[:, :, :size], v[:, :, :size]
    k, v = (filled(x, new) for x, new in ((segment.k, k), (segment.v, v)))
    return Exact(k, v, lengths - left_out, segment.positions.skip(0, left_out))


def filled(buffer: Any, new: jax.Array) -> Any:
    """A buffer whose first slots hold `new` `[B, K, n, D]`, rounded to what they are held in; a whole one is `new`."""
    if hasattr(buffer, "filled"):
        return buffer.filled(new)
    new = narrow(new, buffer.dtype)
    return new if new.shape[2] == buffer.shape[2] else buffer.at[:, :, : new.shape[2]].set(new)


def append(segment: Exact, k: jax.Array, v: jax.Array, counts: jax.Array) -> Exact:
    """Append the first `counts[b]` of T tokens `[B, T, K, D]`; O(T)."""
    return _written(segment, k.swapaxes(1, 2), v.swapaxes(1, 2), counts)


def append_with_query(
    segment: Exact, q: jax.Array, k: jax.Array, v: jax.Array, counts: jax.Array
) -> tuple[Exact, jax.Array]:
    """The same, and their queries `[B, T, N, D]`, which one program rotates with the keys where it can."""
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)

    def by_xla() -> tuple[Buffers, jax.Array]:
        written = _written(segment, k, v, counts)
        return Buffers(written.k, written.v, written.length), q

    held = Buffers(segment.k, segment.v, segment.length)
    (k_held, v_held, length), q = append_token(held, q, k, v, counts, reference=by_xla)
    return Exact(k_held, v_held, length, segment.positions), q


def _written(segment: Exact, k: jax.Array, v: jax.Array, counts: jax.Array) -> Exact:
    # the barrier leaves the old length one reader, so that the new one overwrites it and no copy is made of it
    length = jax.lax.optimization_barrier(segment.length + counts)
    k, v = (write_tokens(x, new, length - counts, counts) for x, new in ((segment.k, k), (segment.v, v)))
    return Exact(k, v, length, segment.positions)


def newest(segment: Exact) -> jax.Array:
    """Position of the last token that each row holds, int32 `[B]`; -1 of none."""
    return jnp.where(segment.length > 0, segment.positions.of_each(segment.length - 1), -1)


def asked(segment: Exact, q: jax.Array, q_positions: jax.Array, window: int | None = None) -> Beside:
    """The segment as the last T tokens' `q` `[B, T, N, D]` (after RoPE) see it."""
    k, v = _as_read(segment)
    tokens = CachedTokens(k, v if v.shape[-1] else k, segment.length, segment.positions)
    causal = q.shape[1] > 1  # nothing lies behind the last token: what a mask costs is a program of each layer's own
    return Beside(q, tokens, q_positions, causal, window)


def attend(
    segment: Exact, q: jax.Array, q_positions: jax.Array, *, scale: float, cap: float | None = None,
    window: int | None = None, beside: Beside | None = None,
) -> AttnPartial:
    """Causal attention of the last T tokens' `q` over the segment, and over what is `beside` it."""
    return attend_to(asked(segment, q, q_positions, window), scale=scale, cap=cap, beside=beside)


def _as_read(segment: Exact) -> tuple[Any, Any]:
    """Keys and values as attention ops read them."""
    k, v = (x.as_read() if isinstance(x, EightBits) else x for x in (segment.k, segment.v))
    return k, v


@state
class Slots:
    """Slots `begin` to `end` of a buffer `[B, K, S, D]`, read where they lie: a slice would copy them at every step."""

    buffer: jax.Array = leaf("batch", "kv_heads", "end_tokens", "head_dim", kind="exact")
    begin: int = static()
    end: int = static()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the part."""
        return (*self.buffer.shape[:2], self.end - self.begin, self.buffer.shape[3])

    @property
    def dtype(self) -> Any:
        """Of the buffer."""
        return self.buffer.dtype

    def read_block(self, start: jax.Array | int, size: int) -> jax.Array:
        """Slots `start` to `start + size` of the part."""
        return slice_block(self.buffer, self.begin + start, size)

    def widened(self) -> jax.Array:
        """The whole part as an array, for kernels."""
        return self.read_block(0, self.shape[2])


def part(segment: Exact, begin: int, end: int) -> Exact:
    """Slots `begin` to `end` as a segment of its own, to attend to; its length may be below 0."""
    k, v = (Slots(x, begin, end) for x in _as_read(segment))
    length = segment.length - begin  # below 0 there is none; what a limit costs is a program of each layer's own
    length = length if end == segment.k.shape[2] else jnp.minimum(length, end - begin)
    return Exact(cast(jax.Array, k), cast(jax.Array, v), length, segment.positions.from_slot(begin))


def flush(segment: Exact, pinned: int, recent: int, most: int, multiple: int = 1) -> tuple[Exact, Flushed]:
    """Take out the oldest tokens of the tail until `recent` are left, `most` at the most.

    Args:
        segment: its last gap lies at slot `pinned`.
        pinned: slots at the front that never leave.
        recent: tokens that stay behind them.
        most: static bound on the tokens that leave.
        multiple: they leave in whole groups of so many; the others wait.
    """
    counts = jnp.clip(segment.length - pinned - recent, 0, most) // multiple * multiple
    slots = pinned + jnp.arange(most)
    k, v = (x[:, :, pinned : pinned + most] for x in (segment.k, segment.v))
    k, v = (x.widened() if isinstance(x, Bits | EightBits) else x for x in (k, v))
    out = Flushed(k, v, segment.positions.at(slots), counts)
    tail = segment.k.shape[2] - pinned

    def shift(buffer):
        if isinstance(buffer, Bits | EightBits):
            return buffer.moved(shift)
        return buffer.at[:, :, pinned:].set(take_tokens(buffer, pinned + counts, tail))

    return Exact(shift(segment.k), shift(segment.v), segment.length - counts, segment.positions.skip(1, counts)), out
