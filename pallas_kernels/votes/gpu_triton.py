"""Votes on a GPU: a Pallas kernel in its Triton dialect, which reads the keys and writes votes, in place.

Programs and splits are those of attention. What XLA does instead are products of all query heads with all tokens, also
where each head owns but some, and their logits in float32.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from lowrank_kv_jax.pallas_kernels.dispatch import Unsupported
from lowrank_kv_jax.pallas_kernels.gpu_grid import Grid, decode_grid
from lowrank_kv_jax.pallas_kernels.gpu_launch import by_head, row_spec
from lowrank_kv_jax.pallas_kernels.gpu_shared_memory import coefficient_grid
from lowrank_kv_jax.pallas_kernels.gpu_softmax import (
    Limits,
    load_block,
    load_ranges,
    logits_of,
    span,
    tile_range,
    visible_slots,
)
from lowrank_kv_jax.pallas_kernels.owned_slots import Rows, numbers, rows_of
from lowrank_kv_jax.pallas_kernels.packing import LOG2_E, Packed, Stored, columns, pack
from lowrank_kv_jax.pallas_kernels.votes.asked import Asked

DTYPES = ("float32", "bfloat16", "float16")
FEW_SLOTS = 1024  # more are worth programs of their own


class Part(NamedTuple):
    """What one launch reads of some tokens, or references to it: slots that queries see int32 `[B, T]`, queries
    `[B', H, M, D]`, keys and votes `[B', H, S, ..]`."""

    begin: Any
    end: Any
    q: Any
    keys: Any
    votes: Any


def add_votes(
    asked: Sequence[Asked], lse: jax.Array, *, scale: float, interpret: bool, least: jax.Array | None = None
) -> tuple[jax.Array, ...]:
    """As `api.add_votes`: each by as many programs as attention has. Where one is of `FEW_SLOTS` at most, the first of
    the last one's programs take it, too, which spares a launch.

    Raises:
        Unsupported: keys that are no array of numbers or of other heads than the votes, more rows of queries than a
            program takes, votes of several queries, or for heads behind each other, that are counted, and what `rows_of`
            refuses.
    """
    if least is not None and (lse.shape[1] > 1 or any(_owned(one) for one in asked)):
        raise Unsupported("votes of several queries, or for heads behind each other, that are counted")
    common = dict(scale=scale, interpret=interpret, least=least)
    if len(asked) == 1 or _together(*asked):
        return _launched(asked, lse, **common)
    return tuple(votes for one in asked for votes in _launched([one], lse, **common))


def _owned(one: Asked) -> bool:
    """Whether its tokens are those of heads behind each other."""
    return getattr(one.tokens.tokens.positions, "owner", None) is not None


def _together(few: Asked, many: Asked) -> bool:
    """Whether programs that read the second may read the first."""
    keys, others = few.tokens.tokens.keys, many.tokens.tokens.keys
    return keys.shape[2] <= FEW_SLOTS and (_owned(many) or keys.shape[1] == others.shape[1])


def _launched(
    asked: Sequence[Asked], lse: jax.Array, *, scale: float, interpret: bool, least: jax.Array | None
) -> tuple[jax.Array, ...]:
    *few, many = asked
    told = many.tokens.q_positions, many.tokens.causal, many.tokens.window
    rows = rows_of(many.tokens.q, many.tokens.tokens, *told)
    parts = [*(_part(rows.beside(one.tokens), one.votes) for one in few), _part(rows, many.votes)]
    batch, heads, count, _ = parts[-1].q.shape
    total = pack(rows_of(lse[..., None], many.tokens.tokens, *told).q, heads, rows.begin, rows.end).q[..., 0]
    widest = max(parts, key=lambda part: part.keys.shape[3] * part.keys.dtype.itemsize)
    token_bytes = widest.keys.shape[3] * widest.keys.dtype.itemsize
    grid = decode_grid(count, batch * heads, parts[-1].keys.shape[2], token_bytes)
    stored = Stored(widest.keys, None), Stored(widest.keys[..., :0], None)
    grid = coefficient_grid(grid, *stored, widest.q.dtype.itemsize)
    number = [] if rows.owner is None else [numbers(batch, rows.owner)]
    packed = Packed(parts[-1].q, rows.begin, rows.end, rows.begin)
    told = number if least is None else [*number, least.astype(jnp.float32)]
    operands = [*((x, row_spec(x, batch)) for x in told), *by_head(packed, rows.owner, total)]
    written = {}
    for i, part in enumerate(parts):
        operands += [(x, row_spec(x, batch)) for x in part[:2]] + by_head(packed, *part[2:])
        written[len(operands) - 1] = i
    arrays, specs = zip(*operands, strict=True)
    found = pl.pallas_call(
        functools.partial(_kernel, grid=grid, scale=scale, owned=rows.owner is not None, parts=len(parts),
                          counted=least is not None),
        grid=(grid.splits, heads, batch),
        in_specs=specs,
        out_specs=[specs[at] for at in written],
        out_shape=[jax.ShapeDtypeStruct(arrays[at].shape, arrays[at].dtype) for at in written],
        input_output_aliases=written,
        compiler_params=plgpu.CompilerParams(num_warps=grid.warps, num_stages=grid.stages),
        interpret=interpret,
        name="votes",
    )(*arrays)
    return tuple(x.reshape(one.votes.shape) for x, one in zip(found, asked, strict=True))


def _part(rows: Rows, votes: jax.Array) -> Part:
    keys = rows.tokens.keys
    if not isinstance(keys, jax.Array) or keys.dtype.name not in DTYPES or votes.size != math.prod(keys.shape[:3]):
        raise Unsupported("keys that are no array of numbers, or of other heads than the votes")
    packed = pack(rows.q, keys.shape[1], rows.begin, rows.end)
    return Part(packed.begin, packed.end, packed.q, keys, votes.reshape(keys.shape[:3]))


def _kernel(*refs, grid: Grid, scale: float, owned: bool, parts: int, counted: bool):
    number, refs = (refs[0][0], refs[1:]) if owned else (None, refs)
    least, refs = (refs[0][0], refs[1:]) if counted else (None, refs)
    owner_ref, refs = (refs[0], refs[1:]) if owned else (None, refs)
    lse_ref, *refs = refs
    vote = functools.partial(_vote, lse_ref=lse_ref, least=least, grid=grid, scale=scale)
    given, written = refs[:-parts], refs[-parts:]
    asked = [Part(*given[i * len(Part._fields) : (i + 1) * len(Part._fields)]) for i in range(parts)]
    for part, out_ref in zip(asked[:-1], written[:-1], strict=True):
        low, high = span(Limits(part.begin, part.end, (), ()))
        here = pl.program_id(0) == 0
        first, stop = low // grid.tile, jnp.where(here, pl.cdiv(high, grid.tile), 0)
        vote(part, out_ref, first, stop, high, None, None)
    start, stop, high = tile_range(Limits(asked[-1].begin, asked[-1].end, (), ()), grid)
    vote(asked[-1], written[-1], start, stop, high, owner_ref, number)


def _vote(
    part: Part, out_ref, start, stop, high, owner_ref, number, *, lse_ref, least: Any, grid: Grid, scale: float
) -> None:
    """Add to the votes for some tiles of tokens."""
    count, pieces, row = part.q.shape[0], columns(part.keys.shape[-1]), jnp.arange(grid.rows)
    there = row < count
    begin, end = load_ranges(Limits(part.begin, part.end, (), ()), grid.rows, count)
    queries = [load_block(part.q, 0, there, piece) for piece in pieces]
    lse = plgpu.load(lse_ref.at[row], mask=there, other=0.0) * LOG2_E

    def body(tile, carry):
        at = tile * grid.tile
        inside = at + jnp.arange(grid.tile) < high
        logits = logits_of(queries, (load_block(part.keys, at, inside, piece) for piece in pieces), grid.tile)
        logits = logits * (scale * LOG2_E) - lse[:, None]
        visible = visible_slots(at, inside, begin, end, owner_ref, number)
        added = jnp.sum(jnp.where(visible, jnp.exp2(jnp.minimum(logits, 0.0)), 0.0), axis=0)
        added = added if least is None else (added > count * least).astype(jnp.float32)
        mine, slots = inside, pl.ds(at, grid.tile)
        if owner_ref is not None:  # other heads' lie between them, whose programs add to these
            mine = inside & (plgpu.load(owner_ref.at[slots], mask=inside, other=-1).astype(jnp.int32) == number)
        old = plgpu.load(part.votes.at[slots], mask=mine, other=0.0)
        plgpu.store(out_ref.at[slots], old + added, mask=mine)
        return carry

    jax.lax.fori_loop(start, stop, body, 0)
