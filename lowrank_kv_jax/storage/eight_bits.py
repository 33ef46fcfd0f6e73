"""Exact ends in 8 bits: codes with a scale for each token and head, which every token brings with it.

In a small cache sinks, recent tokens and the room for those of the next block weigh as much as what is coded: at 16 bits
they are a fifth of one of 2,048 tokens at sixteen times. In 8 bits their errors are far below those of the codes.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, UInt8

from lowrank_kv_jax.storage.block_reads import slice_block
from lowrank_kv_jax.storage.state import leaf, state, static, write_tokens

LARGEST = 127
SCALE = 2  # bytes of a scale, behind the codes: a token is written as one row


@state
class EightBits:
    """Tokens `[B, K, S, D]` as codes times scales; stands in the place of an array in a segment.

    Attributes:
        rows: uint8 `[B, K, S, D + 2]`, D int8 codes and the bfloat16 number that they are multiples of, its low byte
            before its high one.
        dtype: that tokens are widened to.
    """

    rows: jax.Array = leaf("batch", "kv_heads", "end_tokens", "head_dim", kind="exact")
    dtype: Any = static()

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, width = self.rows.shape
        return *lead, width - SCALE

    def widened(self) -> Float[jax.Array, "B K S D"]:
        """The array, in `dtype`."""
        return self.astype(self.dtype)

    def as_read(self) -> Any:
        """What attention ops read: itself, and where the codes lie on lanes the array, on lanes."""
        if not hasattr(self.rows, "on_lanes"):
            return self
        return dataclasses.replace(self.rows, on_lanes=_widened(self.rows.on_lanes, self.dtype, axis=2))

    def astype(self, dtype: Any) -> Float[jax.Array, "B K S D"]:
        """The array in a dtype; float32 holds it to the bit."""
        return _widened(slice_block(self.rows, 0, self.shape[2]), dtype)

    def swapaxes(self, first: int, second: int) -> Float[jax.Array, "..."]:
        return self.widened().swapaxes(first, second)

    def __getitem__(self, index: Any) -> "EightBits":
        """Some rows, heads and tokens, channels as they are."""
        return self.moved(lambda rows: rows[index])

    def moved(self, move: Any) -> "EightBits":
        """By a function that moves tokens about."""
        return dataclasses.replace(self, rows=move(self.rows))

    def read_block(self, start: Int[jax.Array, ""] | int, size: int) -> Float[jax.Array, "B K {size} D"]:
        """Tokens `start` to `start + size` in `dtype`."""
        return _widened(slice_block(self.rows, start, size), self.dtype)

    def filled(self, x: Float[jax.Array, "B K T D"]) -> "EightBits":
        """With `x` `[B, K, T, D]` in its first T slots, T <= S."""
        rows = _coded(x)
        whole = rows.shape[2] == self.rows.shape[2]
        return dataclasses.replace(self, rows=rows if whole else self.rows.at[:, :, : rows.shape[2]].set(rows))

    def write_tokens(
        self, new: Float[jax.Array, "B K T D"], start: Int[jax.Array, " B"], counts: Int[jax.Array, " B"]
    ) -> "EightBits":
        """As `state.write_tokens`."""
        return dataclasses.replace(self, rows=write_tokens(self.rows, _coded(new), start, counts))


def eight_bits_of(x: Float[jax.Array, "B K S D"], dtype: Any) -> EightBits:
    """Tokens `[B, K, S, D]` in 8 bits, to be widened to `dtype`."""
    return EightBits(_coded(x), jnp.dtype(dtype))


def _coded(x: Float[jax.Array, "*tokens D"]) -> UInt8[jax.Array, "*tokens _"]:
    """Rows of codes with their scale, one for all channels of a token.

    The largest entry is always coded as 127, so that what was read in float32 is coded the same again: tokens that move
    from slot to slot lose nothing.
    """
    wide = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=-1, keepdims=True, initial=0.0)
    least = float(jnp.finfo(jnp.bfloat16).tiny)  # a CPU takes smaller ones for zeros
    scale = jnp.maximum(largest / LARGEST, least).astype(jnp.bfloat16).astype(jnp.float32)
    codes = jnp.clip(jnp.round(wide / scale), -LARGEST, LARGEST).astype(jnp.int8)
    bits = jax.lax.bitcast_convert_type(scale, jnp.uint32) >> 16
    return jnp.concatenate([
        jax.lax.bitcast_convert_type(codes, jnp.uint8), (bits & 255).astype(jnp.uint8), (bits >> 8).astype(jnp.uint8),
    ], axis=-1)


def _widened(rows: UInt8[jax.Array, "B K _ _"], dtype: Any, axis: int = 3) -> Float[jax.Array, "B K _ _"]:
    """Tokens of rows whose bytes lie along `axis`."""
    width = rows.shape[axis] - SCALE
    codes = jax.lax.slice_in_dim(rows, 0, width, axis=axis)
    codes = jax.lax.bitcast_convert_type(codes, jnp.int8).astype(jnp.float32)
    # by shifts: a bitcast of two bytes to one number would be a program of its own on a GPU
    low, high = (jax.lax.slice_in_dim(rows, width + i, width + i + 1, axis=axis).astype(jnp.uint32) for i in range(SCALE))
    scale = jax.lax.bitcast_convert_type((high << 24) | (low << 16), jnp.float32)
    return (codes * scale).astype(dtype)
