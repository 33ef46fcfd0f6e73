"""Budgets of a selection as numbers of slots."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lowrank_kv_jax.method.accounting import state_bytes
from lowrank_kv_jax.method.codec import Ends
from lowrank_kv_jax.method.layout import Layout
from lowrank_kv_jax.method.selection import Selection
from lowrank_kv_jax.storage.positions import PerHead

OF_THE_CACHE = 12  # bytes of a row that belong to no group: length, limit and pending
TILE = 128  # slots by which the bytes of quantised storage grow at the least


class Room(NamedTuple):
    """For selected tokens: whether all heads share one buffer, J buffers of `slots`, tokens that a unit keeps of those
    that it chooses from; later ones that are coded and stay have slots of their own."""

    packed: bool
    buffers: int
    slots: int
    tokens: int

    def nowhere(self, layout: Layout) -> PerHead:
        """Positions of tokens that are still to come."""
        shape = (layout.batch, self.buffers, self.slots)
        return PerHead(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.int8) if self.packed else None,
                       layout.spec.kv_heads)


def selected_tokens(rule: Selection, layout: Layout, ends: Ends, tokens: int, layers: Sequence[Any]) -> int:
    """Tokens between the ends of a group of layers.

    Args:
        tokens: between the ends, where every layer of the model keeps as many.
        layers: what the selection knows of each of the group's layers.
    """
    if rule.keeps_none:
        return 0
    goes_on = rule.decoding == "evict"
    room = max((layout.capacity if rule.decoding != "code" else layout.prompt) - ends.sinks - ends.recent, 1)
    most = room if goes_on else layout.prompt - ends.recent
    each = [rule.of_layer(tokens, most, own) for own in layers]
    return min(max(round(sum(each) / len(each)), 1), room)


def tokens_for_bytes(
    rule: Selection, layouts: Sequence[Layout], ends: Ends, groups: Sequence[Sequence[Any]],
    empty: Callable[[Layout, int], Any],
) -> int:
    """Tokens between the ends of every layer, on average, such that a row of the cache takes at most `budget_bytes`.

    Args:
        layouts: of every group of the model: those with a sliding window keep no moments.
        groups: what the selection knows of the layers of every group.
        empty: from a layout and the selected tokens of a group to the group's empty state, or its shapes.

    Raises:
        ValueError: the exact ends alone take more.
    """
    rows, budget = [dataclasses.replace(own, batch=1, mesh=None) for own in layouts], rule.budget_bytes or 0

    def cost(row: Layout) -> tuple[int, int, int]:
        """Bytes with one token, and how many more come with each `step` tokens."""
        one, two, later = (state_bytes(jax.eval_shape(lambda n=n: empty(row, n))) for n in (1, 2, 1 + TILE))
        step = 1 if (two - one) * TILE == later - one else TILE
        return one, (later - one) * step // TILE, step

    costs = {row: cost(row) for row in set(rows)}

    def spent(tokens: int) -> int:
        total = OF_THE_CACHE
        for row, group in zip(rows, groups, strict=True):
            one, slope, step = costs[row]
            total += one + slope * -(-(selected_tokens(rule, row, ends, tokens, group) - 1) // step)
        return total

    low, high = 0, max(rows[0].capacity - ends.sinks - ends.recent, 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if spent(middle) <= budget else (low, middle - 1)
    if low == 0:
        raise ValueError(f"budget_bytes={budget}: sinks, recent tokens, room for a block and statistics take "
                         f"{OF_THE_CACHE + sum(costs[row][0] for row in rows)}")
    return low
