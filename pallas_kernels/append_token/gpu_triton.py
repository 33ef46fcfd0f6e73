"""A token written on a GPU: a Pallas kernel in its Triton dialect, a program for each row, all in place."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from lowrank_kv_jax.pallas_kernels.append_token.buffers import Buffers
from lowrank_kv_jax.pallas_kernels.dispatch import Unsupported
from lowrank_kv_jax.pallas_kernels.gpu_launch import check_bytes
from lowrank_kv_jax.pallas_kernels.gpu_softmax import load_block
from lowrank_kv_jax.pallas_kernels.packing import columns, power_of_two
from lowrank_kv_jax.storage.eight_bits import LARGEST, SCALE, EightBits

ROWS = 32  # heads that are under way at once
CODED = 8  # of those that are coded


def append_token(
    buffers: Buffers, q: jax.Array, k: jax.Array, v: jax.Array, counts: jax.Array, *, interpret: bool
) -> tuple[Buffers, jax.Array]:
    """As `api.append_token`.

    Raises:
        Unsupported: more than a token, buffers that are no arrays, and numbers of several widths or dtypes.
    """
    batch, heads, size, dim = buffers.k.shape
    kept: Any = (buffers.k, buffers.v)
    if {(x.shape[-1], jnp.dtype(x.dtype).name) for x in (*kept, q, k, v)} != {(dim, q.dtype.name)}:
        raise Unsupported("queries, keys and values of several widths or dtypes")
    coded = all(isinstance(x, EightBits) for x in kept)
    kept = [x.rows for x in kept] if coded else kept
    if q.shape[1] != 1 or not all(isinstance(x, jax.Array) for x in kept):
        raise Unsupported("more than a token, or buffers that are no arrays")
    check_bytes(kept)
    # one array of them is one program of XLA's
    new = jnp.concatenate([q[:, 0], k[:, :, 0], v[:, :, 0]], axis=1)

    def row(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, *shape), lambda b: (b, *(0,) * len(shape)))

    number = pl.BlockSpec((1,), lambda b: (b,))
    buffer, told, out_q = row(*kept[0].shape[1:]), jax.ShapeDtypeStruct((batch,), jnp.int32), q[:, 0]
    k, v, length, q = pl.pallas_call(
        functools.partial(_kernel, coded=coded),
        grid=(batch,),
        in_specs=[number, row(*new.shape[1:]), buffer, buffer, number],
        out_specs=[buffer, buffer, number, row(*out_q.shape[1:])],
        out_shape=[*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in kept), told,
                   jax.ShapeDtypeStruct(out_q.shape, out_q.dtype)],
        input_output_aliases={2: 0, 3: 1, 4: 2},
        compiler_params=plgpu.CompilerParams(num_warps=1),  # reads the length before it writes one
        interpret=interpret,
        name="append_token",
    )(counts, new, *kept, buffers.length)
    k, v = (dataclasses.replace(x, rows=rows) for x, rows in ((buffers.k, k), (buffers.v, v))) if coded else (k, v)
    return Buffers(k, v, length), q[:, None]


def _kernel(counts_ref, new_ref, _k_ref, _v_ref, old_ref, k_ref, v_ref, length_ref, q_ref, *, coded: bool):
    count, slot = counts_ref[0], old_ref[0]
    heads, size, _ = k_ref.shape
    queries, dim = q_ref.shape
    taken = (count > 0) & (slot >= 0) & (slot < size)
    for piece in columns(dim):
        _copied(new_ref, 0, queries, piece, q_ref, lambda head: (head,), True)
    for begin, ref in ((queries, k_ref), (queries + heads, v_ref)):
        if coded:
            _coded(new_ref, begin, ref, slot, taken)
            continue
        for piece in columns(dim):
            _copied(new_ref, begin, heads, piece, ref, lambda head: (head, jnp.zeros_like(head) + slot), taken)
    length_ref[0] = slot + count


def _copied(new_ref, begin, count, piece, ref, place, allowed):
    """Some heads of a row's `new_ref` `[n, D]`, from `begin` on, written to where `place` says of each, from 0."""
    rows, start, size = min(ROWS, power_of_two(count, 1)), *piece
    column = start + jnp.arange(size)
    for first in range(0, count, rows):
        head = first + jnp.arange(rows)
        there = head < count
        found = load_block(new_ref, begin + first, there, piece)
        at = [jnp.broadcast_to(x, (rows, size)) for x in (*(i[:, None] for i in place(head)), column[None])]
        mask = (there & allowed)[:, None] & (column < ref.shape[-1])[None]
        plgpu.store(ref.at[tuple(at)], found, mask=mask)


def _coded(new_ref, begin, ref, slot, taken):
    """All heads of a token as rows of `EightBits`, which are numbers as `storage.eight_bits` says."""
    heads, _, width = ref.shape
    dim, rows = width - SCALE, min(CODED, power_of_two(heads, 1))
    least = float(jnp.finfo(jnp.bfloat16).tiny)
    for first in range(0, heads, rows):
        head = first + jnp.arange(rows)
        there = head < heads

        def store(byte, channel, head=head, there=there):
            at = [jnp.broadcast_to(x, byte.shape) for x in (head[:, None], slot, channel[None])]
            mask = (there & taken)[:, None] & (channel < width)[None]
            plgpu.store(ref.at[tuple(at)], (byte & 255).astype(jnp.uint8), mask=mask)

        pieces = {piece: load_block(new_ref, begin + first, there, piece).astype(jnp.float32) for piece in columns(dim)}
        largest = functools.reduce(jnp.maximum, (jnp.max(jnp.abs(x), axis=1) for x in pieces.values()))
        # a GPU's maximum drops NaN, and a broken model has to be seen
        broken = functools.reduce(jnp.maximum, (jnp.max((x != x).astype(jnp.int32), axis=1) for x in pieces.values()))
        scale = jnp.where(broken > 0, jnp.nan, jnp.maximum(largest / LARGEST, least))
        scale = scale.astype(jnp.bfloat16).astype(jnp.float32)[:, None]
        for (start, size), x in pieces.items():
            channel = start + jnp.arange(size)
            store(jnp.clip(_nearest(x / scale), -LARGEST, LARGEST), jnp.where(channel < dim, channel, width))
        bits = jax.lax.bitcast_convert_type(scale, jnp.int32) >> 16
        store(bits >> (8 * jnp.arange(SCALE))[None], dim + jnp.arange(SCALE))


def _nearest(x):
    """The nearest whole number, int32, of two the even one: the dialect has no rounding of its own."""
    below = jnp.floor(x)
    whole, rest = below.astype(jnp.int32), x - below
    return whole + ((rest > 0.5) | ((rest == 0.5) & (whole % 2 != 0))).astype(jnp.int32)
