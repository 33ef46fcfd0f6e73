"""What the kernels of this op share: queries and bases as channel pairs, and positions, in runs or slot by slot."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.attention.partial import AttnPartial
from lowrank_kv_jax.pallas_kernels.packing import Packed, pack, visible_range
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention.angles import (
    Pairs,
    channel_pairs,
    digit_tables,
    split_pairs,
    steps_of_pairs,
)
from lowrank_kv_jax.storage.basis import as_array, expand_values, whole_basis
from lowrank_kv_jax.storage.positions import OfPages, Runs, pieces_of


class Rotary(NamedTuple):
    """Inputs of a kernel beside the stored coefficients.

    Attributes:
        packed: queries `[B, K, M, 2 H]`, the first channels of all pairs and then the second; H = D / 2 rounded up to
            a power of two.
        basis: key basis of each kv head `[B or 1, K, 2 H, R]`, its channels in the same order; or of all layers' heads.
        first: of these, the layer's first; None where there are no others.
        mean: of the keys of each kv head `[B or 1, K, 2 H]`, float32, as above; None where they have none.
        gaps: of positions in runs, of which there is one more; None where all slots are one run, because positions do not
            count, or are those of each slot.
        positions: int32 `[B, J, S]`, of slots that follow no order; None where they are runs.
        of_pages: the runs of which these are pages, or None.
        cos, sin: `digit_tables`, for runs.
        steps: `steps_of_pairs`, for `positions`.
    """

    packed: Packed
    basis: jax.Array
    first: int | None
    mean: jax.Array | None
    gaps: Runs | None
    positions: jax.Array | None
    cos: jax.Array
    sin: jax.Array
    steps: jax.Array
    of_pages: Runs | None = None

    @property
    def runs(self) -> int:
        """How many there are."""
        return 1 if self.gaps is None else 1 + self.gaps.start.shape[1]


def prepare(
    q, tokens, key_basis, *, rope, kv_heads, q_positions, causal, window, key_mean=None, basis_dtype=None
) -> Rotary:
    """Arrange the op's arguments, the basis in the queries' dtype where none is told.

    Raises:
        Unsupported: what `pack` and `visible_range` refuse, so that heads packed in one buffer never come here.
    """
    head_dim = q.shape[-1]
    pairs = channel_pairs(rope, head_dim)
    packed = pack(q, kv_heads, *visible_range(tokens, q_positions, causal, window))
    where, gaps, positions = tokens.positions, None, None
    if rope is not None and isinstance(where, Runs):
        gaps = where
    elif rope is not None:
        positions = where.position
    dtype = basis_dtype or q.dtype
    whole, first = whole_basis(key_basis, head_dim) if pairs.lie_in_order else (as_array(key_basis), None)
    if whole.dtype != dtype:
        whole, first = as_array(key_basis).astype(dtype), None
    whole = whole if whole.ndim == 4 else whole[None]
    by_head = whole.reshape(len(whole), -1, head_dim, whole.shape[-1]).swapaxes(2, 3)
    basis = jnp.moveaxis(split_pairs(by_head, pairs), 2, -1)
    basis = basis.reshape(*basis.shape[:2], 2 * pairs.padded, -1)
    cos, sin, steps = (jnp.asarray(x) for x in (*digit_tables(rope, head_dim), steps_of_pairs(rope, head_dim)))
    turned = split_pairs(packed.q, pairs)
    packed = packed._replace(q=turned.reshape(*turned.shape[:3], -1))
    of_pages = where.runs if positions is not None and isinstance(where, OfPages) else None
    mean = _mean(key_mean, pairs)
    return Rotary(packed, basis, first, mean, gaps, positions, cos, sin, steps, of_pages)


def in_head_space(part: AttnPartial, value_basis: jax.Array | None, kv_heads: int) -> AttnPartial:
    """Attended coefficients of values expanded; as they are without a basis."""
    return part if value_basis is None else AttnPartial(expand_values(value_basis, part.out, kv_heads), part.lse)


def _mean(key_mean: jax.Array | None, pairs: Pairs) -> jax.Array | None:
    if key_mean is None:
        return None
    rows = key_mean if key_mean.ndim == 3 else key_mean[None]
    return split_pairs(rows.astype(jnp.float32), pairs).reshape(*rows.shape[:2], -1)


class Run(NamedTuple):
    """Tiles that hold a run of consecutive positions; a tile with a gap in it is visited once for each of its runs.

    Attributes:
        visit: number of the first visit to one of them, counted over all runs.
        tile: the first of them.
        offset: position minus slot.
        low, high: its slots that some query sees, low <= slot < high.
    """

    visit: jax.Array
    tile: jax.Array
    offset: jax.Array
    low: jax.Array
    high: jax.Array


def visits(rotary: Rotary, tile: int) -> jax.Array:
    """`table_of` each row, int32 `[B, 5 P + 1]`."""
    gaps, span = rotary.gaps, rotary.packed.span
    told = ([], []) if gaps is None else ([x[:, p] for p in range(x.shape[1])] for x in (gaps.start, gaps.jump))
    return jnp.stack(table_of(*told, span[:, 0], span[:, 1], tile), axis=1)


def table_of(
    start: list[jax.Array], jump: list[jax.Array], low: jax.Array, high: jax.Array, tile: int
) -> list[jax.Array]:
    """P `Run`s and how many visits they make, 5 P + 1 numbers; `read_run` finds them again.

    Args:
        start, jump: as of `Runs`, of each gap, of any shape.
        low, high: slots that some query sees; the same where none is.
    """
    first, offset = pieces_of(start, jump) if start else ([jnp.zeros_like(low)], [jnp.zeros_like(low)])
    found, until = [], jnp.zeros_like(low)
    for begin, last, added in zip(first, [*first[1:], np.iinfo(np.int32).max], offset, strict=True):
        lowest, highest = jnp.maximum(begin, low), jnp.minimum(last, high)
        tiles = jnp.where(highest > lowest, (highest + tile - 1) // tile - lowest // tile, 0)
        found.append((until, lowest // tile, added, lowest, highest))
        until = until + tiles
    return [*(number for field in zip(*found, strict=True) for number in field), until]


def read_run(read: Callable[[int], jax.Array], runs: int, visit) -> Run:
    """Inside of a kernel: the run and the tile of a visit; `read(i)` gives number `i` of what `table_of` gives."""
    fields = [read(field * runs) for field in range(5)]
    for run in range(1, runs):
        behind = visit >= read(run)
        fields = [jnp.where(behind, read(field * runs + run), now) for field, now in enumerate(fields)]
    return Run(*fields)._replace(tile=fields[1] + visit - fields[0])
