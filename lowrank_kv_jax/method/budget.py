"""Budgets of a selection as numbers of slots."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lowrank_kv_jax.method.accounting import state_bytes
from lowrank_kv_jax.method.codec import Ends
from lowrank_kv_jax.method.group import GroupBases, GroupState, Look
from lowrank_kv_jax.method.layout import Layout
from lowrank_kv_jax.method.selection import Selection
from lowrank_kv_jax.storage import backend
from lowrank_kv_jax.storage.positions import PerHead, owner_dtype

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
        shape, heads = (layout.batch, self.buffers, self.slots), layout.spec.kv_heads
        return PerHead(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, owner_dtype(heads)) if self.packed else None, heads)


def selected_tokens(rule: Selection, layout: Layout, ends: Ends, tokens: int, layers: Sequence[Any]) -> int:
    """Tokens between the ends of a group of layers.

    Args:
        tokens: between the ends, where every layer of the model keeps as many.
        layers: what the selection knows of each of the group's layers.
    """
    if rule.keeps_none:
        return 0
    exact = ends.sinks + ends.recent
    room = max((layout.capacity if rule.decoding != "code" else layout.prompt) - exact, 1)
    most = room if rule.decoding == "evict" else max(layout.prompt - exact, 1)
    each = [rule.of_layer(tokens, most, own) for own in layers]
    return min(max(round(sum(each) / len(each)), 1), room)


def tokens_for_bytes(
    machine: Any, layouts: Sequence[Layout], looks: Sequence[Look], ends: Ends, groups: Sequence[Sequence[Any]]
) -> int:
    """Tokens between the ends of every layer, on average, such that a row of the cache takes at most `budget_bytes`.

    Args:
        machine: the method; its selection has the budget.
        layouts: of every group of the model: those with a sliding window keep no moments.
        looks: of the codec's bases of every group, whose tokens may differ in bytes.
        groups: what the selection knows of the layers of every group.

    Raises:
        ValueError: the exact ends and one token take more.
    """
    rows, rule = [dataclasses.replace(own, batch=1, mesh=None) for own in layouts], machine.selection
    budget, traced_for = rule.budget_bytes, backend.choose()
    of_groups = [_costs(machine, row, look, len(group), traced_for)
                 for row, look, group in zip(rows, looks, groups, strict=True)]

    def spent(tokens: int) -> int:
        total = OF_THE_CACHE
        for row, group, (one, slope, step) in zip(rows, groups, of_groups, strict=True):
            total += one + slope * -(-(selected_tokens(rule, row, ends, tokens, group) - 1) // step)
        return total

    def held(tokens: int) -> int:
        """What `spent` foretells, but for slots that long stores round up."""
        each = (selected_tokens(rule, row, ends, tokens, group) for row, group in zip(rows, groups, strict=True))
        return OF_THE_CACHE + sum(_bytes(machine, row, look, len(group), own, traced_for)
                                  for row, look, group, own in zip(rows, looks, groups, each, strict=True))

    low, high = 0, max(rows[0].capacity - ends.sinks - ends.recent, 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if spent(middle) <= budget else (low, middle - 1)
    while low and (total := held(low)) > budget:
        low -= max((total - budget) * low // total, 1)
    if low == 0:
        raise ValueError(f"budget_bytes={budget}: must be at least {spent(1)}, which sinks, recent tokens, room for a "
                         "block, statistics and one token a layer take")
    return low


@functools.lru_cache(maxsize=1024)
def _costs(machine: Any, row: Layout, look: Look, layers: int, traced_for: str) -> tuple[int, int, int]:
    """Bytes of a group of so many layers with one token, and how many more come with each `step` tokens.

    Args:
        traced_for: the backend, on which shapes may depend.
    """
    one, two, later = (_bytes(machine, row, look, layers, tokens, traced_for) for tokens in (1, 2, 1 + TILE))
    step = 1 if (two - one) * TILE == later - one else TILE
    return one, (later - one) * step // TILE, step


@functools.lru_cache(maxsize=1024)
def _bytes(machine: Any, row: Layout, look: Look, layers: int, tokens: int, traced_for: str) -> int:
    """Of a group of so many layers with so many selected tokens; `traced_for` as in `_costs`."""
    del traced_for

    def state(codec: Any) -> GroupState:
        return machine.empty(row, GroupBases(codec, (None,) * layers), tokens)

    return state_bytes(jax.eval_shape(state, jax.tree.unflatten(*look)))
