"""Online softmax on a TPU over tokens that lie on the lanes, `[R, tokens]`: scratch in VMEM, one tile a grid step."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from lowrank_kv_jax.pallas_kernels.dispatch import Unsupported
from lowrank_kv_jax.pallas_kernels.packing import EMPTY, Packed, power_of_two

LANES = 128
TILES_IN_ORDER = pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary"))
"""For a grid of rows, heads and tiles: the tiles of a head share its scratch."""


def interpreter(interpret: bool):
    """What `pallas_call` takes: False, or the interpreter of TPU programs, which looks for races and starts with NaN."""
    return pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan") if interpret else False


def tokens_on_lanes(tokens, name: str) -> jax.Array:
    """The buffer `[B, J, R, S]` behind keys or values.

    Raises:
        Unsupported: they lie in rows `[S, R]`, which XLA would copy whole into this layout at every call.
    """
    data = getattr(tokens, "on_lanes", None)
    if data is None:
        raise Unsupported(f"{name} lie as [tokens, rank]: convert the cache by with_token_layout(cache, 'lanes')")
    if data.dtype.name not in ("float32", "bfloat16"):
        raise Unsupported(f"{name} of dtype {data.dtype.name}, allowed are float32, bfloat16")
    if data.dtype == jnp.bfloat16 and data.shape[2] < 8:
        raise Unsupported(f"{name} of rank {data.shape[2]}: in bfloat16 at least 8")
    return data


def padded(packed: Packed) -> Packed:
    """Query rows padded to a register's; the new ones see nothing. Slot ranges as columns `[B, M, 1]`."""
    rows = packed.q.shape[2]
    more = power_of_two(rows, 16) - rows
    begin, end = (jnp.pad(x, ((0, 0), (0, more)))[..., None] for x in (packed.begin, packed.end))
    return Packed(jnp.pad(packed.q, ((0, 0), (0, 0), (0, more), (0, 0))), begin, end, packed.span)


def partial_shape(batch: int, heads: int, rows: int, width: int) -> list[jax.ShapeDtypeStruct]:
    """Of the output and its log-sum-exp, float32."""
    return [jax.ShapeDtypeStruct((batch, heads, rows, size), jnp.float32) for size in (width, 1)]


def scratch(rows: int, width: int) -> list:
    """Running maximum and sum, a number for each row on all lanes, and the output."""
    return [pltpu.VMEM((rows, LANES), jnp.float32)] * 2 + [pltpu.VMEM((rows, width), jnp.float32)]


def start(top_ref, total_ref, acc_ref) -> None:
    """No tokens yet."""
    top_ref[...] = jnp.full_like(top_ref, EMPTY)
    total_ref[...] = jnp.zeros_like(total_ref)
    acc_ref[...] = jnp.zeros_like(acc_ref)


def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Product in float32; operands in float32 are multiplied as such, not in one bfloat16 pass."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jax.lax.dot_general(
        a, b, (((contract[0],), (contract[1],)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def add_tile(logits, visible, values, inside, top_ref, total_ref, acc_ref) -> None:
    """One tile: logits and visible `[M, tokens]`, values `[R, tokens]` of which `inside` `[1, tokens]` are valid."""
    logits = jnp.where(visible, logits, EMPTY)
    old = top_ref[:, :1]
    top = jnp.maximum(old, jnp.max(logits, axis=1, keepdims=True))
    weights = jnp.where(visible, jnp.exp(logits - top), 0.0)
    shrink = jnp.exp(old - top)
    top_ref[...] = jnp.broadcast_to(top, top_ref.shape)
    total_ref[...] = total_ref[...] * shrink + jnp.sum(weights, axis=1, keepdims=True)
    values = jnp.where(inside, values, jnp.zeros_like(values))
    acc_ref[...] = acc_ref[...] * shrink + dot(weights.astype(values.dtype), values, (1, 1))


def finish(out_ref, lse_ref, top_ref, total_ref, acc_ref) -> None:
    """Write the partial; rows that saw nothing get (0, `EMPTY`)."""
    total = total_ref[:, :1]
    empty = total == 0
    total = jnp.where(empty, 1.0, total)
    out_ref[...] = acc_ref[...] / total
    lse_ref[...] = jnp.where(empty, EMPTY, top_ref[:, :1] + jnp.log(total))


def slots_of(tile, size: int) -> jax.Array:
    """The slots of a tile, int32 `[1, size]`."""
    return tile * size + jax.lax.broadcasted_iota(jnp.int32, (1, size), 1)
