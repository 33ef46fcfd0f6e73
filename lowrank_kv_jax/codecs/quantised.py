"""Quantised storage: 8-bit codes with scales, widened where they are read.

Storage is the second half of a codec: any transform's output can be kept by it. What a storage class holds
stands in the place of a plain array in a segment, and the attention ops read it block by block.
"""

import jax
import jax.numpy as jnp

from lowrank_kv_jax.state import leaf, state

TILE = 128  # tokens that share a scale
BASIS_STORAGE = ("bfloat16", "float16", "float32", "float8_e4m3fn", "int8")
_LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}


def quantise(x: jax.Array, axis: int, dtype: str = "int8") -> tuple[jax.Array, jax.Array]:
    """Symmetric codes of `dtype` ("int8" or "float8_e4m3fn") and bfloat16 scales, one for all of `axis`.

    The scale is rounded before it is used, so that codes * scale errs by half a step at most. All zeros stay
    zeros.
    """
    x = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=axis, keepdims=True)
    # rounding to bfloat16 takes away at most 2^-8 of it: the largest entry must still fit
    scale = (largest * (1 + 2.0**-8) / _LARGEST[dtype]).astype(jnp.bfloat16)
    codes = x / jnp.where(scale == 0, 1.0, scale.astype(jnp.float32))
    codes = jnp.round(codes).astype(jnp.int8) if dtype == "int8" else codes.astype(dtype)
    return codes, scale


@state
class Int8Tokens:
    """Coefficients of tokens in 8 bits, a scale for each component of each tile of tokens.

    Components of a principal basis differ in size by orders of magnitude: a scale for each keeps the small
        ones.

    Attributes:
        codes: int8 `[B, J, S, R]`.
        scales: bfloat16 `[B, J, ceil(S / TILE), R]`.
    """

    codes: jax.Array = leaf("batch", "kv_heads", "tokens", "rank", kind="coefficients")
    scales: jax.Array = leaf("batch", "kv_heads", "tokens", "rank", kind="scales")

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    def read_block(self, start: jax.Array | int, size: int) -> jax.Array:
        """Tokens `start` to `start + size`, float32 `[B, J, size, R]`."""
        codes = jax.lax.dynamic_slice_in_dim(self.codes, start, size, axis=2)
        scales = jnp.take(self.scales, (start + jnp.arange(size)) // TILE, axis=2)
        return codes.astype(jnp.float32) * scales.astype(jnp.float32)


def store_tokens(x: jax.Array, bits: int | None, dtype) -> "jax.Array | Int8Tokens":
    """Keep coefficients `[B, J, S, R]` as `dtype`, or in 8 bits."""
    if bits is None:
        return x.astype(dtype)
    size = x.shape[2]
    tiles = -(-size // TILE)
    padded = jnp.pad(x, ((0, 0), (0, 0), (0, tiles * TILE - size), (0, 0)))
    codes, scales = quantise(padded.reshape(*x.shape[:2], tiles, TILE, -1), axis=3)
    return Int8Tokens(codes.reshape(padded.shape)[:, :, :size], scales[:, :, :, 0])


def read_tokens(stored: "jax.Array | Int8Tokens") -> jax.Array:
    """All tokens, widened to float32."""
    if isinstance(stored, Int8Tokens):
        return stored.read_block(0, stored.shape[2])
    return stored.astype(jnp.float32)


@state
class ScaledBasis:
    """A basis in 8 bits, a scale for each column.

    Attributes:
        codes: int8 or float8 `[B, J, W, R]`.
        scales: bfloat16 `[B, J, 1, R]`.
    """

    codes: jax.Array = leaf("batch", "kv_heads", "width", "rank", kind="bases")
    scales: jax.Array = leaf("batch", "kv_heads", None, "rank", kind="scales")

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape


def store_basis(basis: jax.Array, dtype: str) -> "jax.Array | ScaledBasis":
    """Keep a basis `[B, J, W, R]` as one of `BASIS_STORAGE`."""
    if dtype in _LARGEST:
        return ScaledBasis(*quantise(basis, axis=2, dtype=dtype))
    return basis.astype(dtype)


def read_basis(stored: "jax.Array | ScaledBasis", begin: int = 0, end: int | None = None) -> jax.Array:
    """Rows `begin` to `end` of the width, widened to float32 `[B, J, end - begin, R]`."""
    if isinstance(stored, ScaledBasis):
        codes = stored.codes[:, :, begin:end].astype(jnp.float32)
        return codes * stored.scales.astype(jnp.float32)
    return stored[:, :, begin:end].astype(jnp.float32)
