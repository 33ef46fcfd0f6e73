"""Decode attention over coefficients for TPUs: tokens on the lanes, one pass over the tokens of each kv head."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lowrank_kv_jax.attention.partial import AttnPartial
from lowrank_kv_jax.pallas_kernels import tpu_softmax
from lowrank_kv_jax.pallas_kernels.dispatch import Unsupported
from lowrank_kv_jax.pallas_kernels.owned_slots import numbers
from lowrank_kv_jax.pallas_kernels.packing import by_program, pack, unpack
from lowrank_kv_jax.pallas_kernels.tpu_pages import paged_tokens
from lowrank_kv_jax.pallas_kernels.tpu_softmax import Step
from lowrank_kv_jax.pallas_kernels.tpu_tiled import tiled_tokens


def reads_beside(tokens, others) -> bool:
    """As of `gpu_triton`."""
    del tokens, others
    return False


def attend_slots(
    q, tokens, begin, end, *, scale: float, size: int, interpret: bool, owner: jax.Array | None = None
) -> AttnPartial:
    """Queries `[B, T, N, Rk]` over the slots `begin <= slot < end` `[B, T]` of tokens that B / B' rows in order share.

    Args:
        size: most tokens that a row sees, from the tile of its first one on: the grid has steps for no more.
        owner: see `owned_slots.Rows`.
    """
    return attend_met(
        Met(q[:, None]), tokens, begin, end, scale=scale, size=size, interpret=interpret, owner=owner
    )


class Met(NamedTuple):
    """Queries as tokens meet them, of n stretches of these each their own.

    Attributes:
        q: `[B, n, T, N, Rk]`.
        tokens: of a stretch, of which steps of the grid take a whole part; None: all.
        added: float32 `[B, T, N, n * tokens]`, what is added to each slot's logits, or None.
    """

    q: jax.Array
    tokens: int | None = None
    added: jax.Array | None = None


def attend_met(
    met: Met, tokens, begin, end, *, scale: float, size: int, interpret: bool, owner: jax.Array | None = None
) -> AttnPartial:
    """The same of queries that may differ from stretch to stretch."""
    keys, values = (_stored(getattr(tokens, x), x) for x in ("keys", "values"))
    heads, queries = max(keys.heads, values.heads), met.q.shape[2]
    packed = pack(met.q[:, 0], heads, begin, end)
    rows = packed.q.shape[2]
    packed = tpu_softmax.padded(packed)

    def padded(x: jax.Array) -> jax.Array:
        return jnp.pad(by_program(x, heads), [(0, 0)] * 3 + [(0, packed.q.shape[2] - rows), (0, 0)])

    added = None if met.added is None else padded(met.added[:, None])[:, :, 0]
    met = met._replace(q=padded(keys.spread(met.q)), added=added)
    part = attend_packed(packed, met, keys, values, scale=scale, size=size, interpret=interpret, owner=owner)
    return unpack(AttnPartial(part.out[:, :, :rows], part.lse[:, :, :rows]), queries)


def _stored(tokens: Any, name: str) -> Any:
    """Keys or values as a kernel reads them; `Unsupported` where none does."""
    return tiled_tokens(tokens) or paged_tokens(tokens) or tpu_softmax.lane_tokens(tokens, name)


def attend_packed(
    packed, met: Met, keys: Any, values: Any, *, scale: float, size: int, interpret: bool, owner: jax.Array | None = None
) -> AttnPartial:
    """Partial `[B, H, M, Rv]`, lse `EMPTY` where a row sees nothing; `packed` padded, tokens as of `_stored`.

    Args:
        met: `q` `[B, H, n, M, columns]`, `added` `[B, H, M, n * tokens]`.
    """
    (batch, heads, rows, _), width = packed.q.shape, values.width
    tile = tpu_softmax.tile_of(size, keys, values)
    tile = tile if met.tokens is None else min(tile, met.tokens)
    if max(keys.least, values.least) > tile:
        raise Unsupported(f"tokens of which a step reads more than the {tile} that meet the same queries")
    memory = tpu_softmax.memory_for(tile, keys, values)
    # fewer than all slots may begin within a tile and end in another
    tiles = pl.cdiv(size, tile) + (size < keys.slots)
    table, (keys, values) = _told(packed.span, owner, keys, values)

    def near(i, b, table):  # a step beyond the valid tokens repeats the last tile, which is not read again
        first = table[b, 0] // tile
        return jnp.minimum(first + i, jnp.maximum(pl.cdiv(table[b, 1], tile) - 1, first))

    per_row = pl.BlockSpec((None, rows, 1), lambda b, h, i, table: (b, 0, 0))

    def per_head(lanes):
        return pl.BlockSpec((None, None, rows, lanes), lambda b, h, i, table: (b, h, 0, 0))

    def of_stretch(b, h, i, table):
        return b, h, 0 if met.tokens is None else near(i, b, table) * tile // met.tokens, 0, 0

    queries = pl.BlockSpec((None, None, None, rows, met.q.shape[-1]), of_stretch)
    owners, owned = [], []
    if owner is not None:
        share, owners = batch // owner.shape[0], [owner]
        owned = [pl.BlockSpec((None, 1, tile), lambda b, h, i, table: (b // share, 0, near(i, b, table)))]
    more = [] if met.added is None else [met.added]
    per_slot = pl.BlockSpec((None, None, rows, tile), lambda b, h, i, table: (b, h, 0, near(i, b, table)))
    specs = [spec for x in (keys, values) for spec in x.specs(batch, heads, tile, near)]
    arrays = [array for x in (keys, values) for array in x.arrays(tile)]
    out, lse = pl.pallas_call(
        functools.partial(
            _kernel, stored=(keys, values), tile=tile, scale=scale, owned=owner is not None, added=bool(more)
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, heads, tiles),
            in_specs=[per_row, per_row, queries, *[per_slot] * len(more), *owned, *specs],
            out_specs=[per_head(width), per_head(1)],
            scratch_shapes=tpu_softmax.scratch(rows, width),
        ),
        out_shape=tpu_softmax.partial_shape(batch, heads, rows, width),
        compiler_params=memory,
        interpret=tpu_softmax.interpreter(interpret),
        name="coefficient_attention",
    )(table, packed.begin, packed.end, met.q, *more, *owners, *tpu_softmax.where_they_lie(arrays, interpret))
    return AttnPartial(values.collected(out), lse[..., 0])


def _told(span: jax.Array, owner: jax.Array | None, *stored: Any) -> tuple[jax.Array, list[Any]]:
    """What a kernel is told of each row, int32 `[B, n]`: its span, the head that it is, and what storages ask for.

    Returns:
        The table, and the storages, which know the column where their own numbers begin.
    """
    rows, column, placed = span.shape[0], 3, []
    parts = [span, jnp.zeros((rows, 1), jnp.int32) if owner is None else numbers(rows, owner)]
    for x in stored:
        placed.append(x._replace(column=column))
        parts.append(x.numbers(rows))
        column += parts[-1].shape[1]
    return jnp.concatenate(parts, axis=1), placed


def _kernel(table_ref, begin_ref, end_ref, q_ref, *refs, stored, tile: int, scale: float, owned: bool, added: bool):
    refs, row, i = list(refs), pl.program_id(0), pl.program_id(2)
    added_ref = refs.pop(0) if added else None
    owner_ref = refs.pop(0) if owned else None
    low, high = table_ref[row, 0], table_ref[row, 1]
    this = low // tile + i
    step = Step(this, tile, tpu_softmax.slots_of(this, tile), high, lambda column: table_ref[row, column])
    keys, values = (x.tile(refs, tile).at(step) for x in stored)
    out_ref, lse_ref, *state = refs
    pl.when(i == 0)(lambda: tpu_softmax.start(*state))

    @pl.when(this * tile < high)
    def _():
        inside = step.slots < high
        visible = (step.slots >= begin_ref[...]) & (step.slots < end_ref[...])
        if owner_ref is not None:
            visible &= owner_ref[...].astype(jnp.int32) == table_ref[row, 2]
        logits = keys.of_tokens(q_ref[...], inside)
        logits = (logits if added_ref is None else logits + added_ref[...]) * scale
        tpu_softmax.add_tile(logits, visible, values, inside, q_ref.dtype, *state)

    pl.when(i == pl.num_programs(2) - 1)(lambda: tpu_softmax.finish(out_ref, lse_ref, *state))
