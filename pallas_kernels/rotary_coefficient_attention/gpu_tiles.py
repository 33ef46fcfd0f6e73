"""The op on a GPU where keys were coded turned by their place in a tile: the kernel over packed codes after RoPE, whose
queries are folded once a tile, around logits that positions alone decide."""

import jax
import jax.numpy as jnp

from lowrank_kv_jax.attention.partial import AttnPartial
from lowrank_kv_jax.attention.rope import RopeSpec
from lowrank_kv_jax.attention.turning import TILE, turning_logits
from lowrank_kv_jax.pallas_kernels.coefficient_attention import gpu_codes
from lowrank_kv_jax.pallas_kernels.coefficient_attention.gpu_codes import Folded
from lowrank_kv_jax.pallas_kernels.dispatch import Unsupported
from lowrank_kv_jax.pallas_kernels.gpu_packed import WINDOW, WINDOWS, columns_of, middles_of, order_of, power_above
from lowrank_kv_jax.pallas_kernels.packed_codes import spread
from lowrank_kv_jax.pallas_kernels.packing import stored_arrays, visible_range
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention import tiles
from lowrank_kv_jax.storage import precise
from lowrank_kv_jax.storage.basis import split_heads
from lowrank_kv_jax.storage.water_filled import WidthRuns

MORE = 1.1  # columns that wide windows of keys may have for each that narrow ones have
LARGEST = 2.0**15  # of float16 numbers: the smallest normal ones are 2^29 times smaller
LEAST = 2.0**-100  # of a basis, which may be zeros


def attend(
    q, tokens, key_basis, *, rope, kv_heads, scale, q_positions, causal, window, key_mean, origin, interpret
) -> AttnPartial:
    """As `gpu_triton.rotary_coefficient_attention`, less what follows the attended values.

    Raises:
        Unsupported: tokens in no order, and what the kernel over codes does not read.
    """
    tiles.check(tokens, rope)
    keys, values = stored_arrays(tokens.keys), stored_arrays(tokens.values)
    gpu_codes.check(q, keys, values)
    if keys.runs is None:
        raise Unsupported("keys that are turned by their place in a tile, not packed in several widths")
    begin, end = visible_range(tokens, q_positions, causal, window)
    begins = tiles.begins_of(tokens, origin)
    folded = _folded(q, key_basis, rope, kv_heads, begins, keys.runs)
    if key_mean is not None:
        folded = folded._replace(added=turning_logits(rope, q, key_mean, begins))
    return gpu_codes.attend_folded(
        folded, keys, values, begin, end, scale=scale, size=keys.codes.shape[2], interpret=interpret
    )


def _folded(
    q: jax.Array, basis: jax.Array, rope: RopeSpec, kv_heads: int, begins: jax.Array, runs: WidthRuns
) -> Folded:
    """Queries `[B, T, N, D]` turned back to where n tiles begin, at positions `[B, n]`, and folded.

    No product is larger than the norms of its two factors allow: both are scaled by them before they are multiplied, so
    that the numbers that come of it need not be read for their largest.
    """
    dim, window = q.shape[-1], _window(runs)
    largest = power_above(dim**0.5 * jnp.maximum(jnp.max(jnp.abs(basis)).astype(jnp.float32), LEAST)) / LARGEST
    basis = spread(basis.astype(jnp.float32) / largest, order_of(runs, window)).astype(jnp.float16)
    power = power_above(jnp.linalg.norm(q.astype(jnp.float32), axis=-1))
    unit = q.astype(jnp.float32) / power[..., None]
    back = tiles.turned_back(unit, rope, begins).astype(jnp.float16)
    by_head = split_heads(basis, kv_heads)
    rows, groups, each = "b" * (by_head.ndim == 5), *by_head.shape[-4:-2]
    numbers = jnp.einsum(f"bntjhgd,{rows}jhdr->jhbntgr", back.reshape(*back.shape[:3], groups, each, -1, dim), by_head)
    numbers = numbers.reshape(kv_heads, *numbers.shape[2:])
    middles = precise.matmul(basis.astype(jnp.float32), jnp.asarray(middles_of(runs, window), jnp.float32))
    above = _products(middles, back, kv_heads) * (largest * power)[:, None]
    return Folded(numbers, window, largest * power / 2, above, TILE)  # what the kernel takes the power above of


def _window(runs: WidthRuns) -> int:
    """As wide as zeros among the bytes allow: a program copies each tile's queries, a window's numbers at once."""
    return next(size for size in WINDOWS if columns_of(runs, size) <= MORE * columns_of(runs, WINDOW))


def _products(of_heads: jax.Array, q: jax.Array, kv_heads: int) -> jax.Array:
    """Float32 `[B, n, T, N]` of numbers `[.., J, W]` and queries `[B, n, T, N, D]`: a sum that joins what it is of."""
    *rows, _, _ = of_heads.shape
    own = of_heads.reshape(*rows, kv_heads, -1)
    own = jnp.repeat(own, q.shape[3] // kv_heads, axis=-2)
    own = own[:, None, None] if rows else own
    return jnp.sum(own * q.astype(jnp.float32), axis=-1)
