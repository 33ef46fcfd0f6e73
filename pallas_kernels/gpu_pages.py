"""Tokens of chosen pages on a GPU: Triton kernels read them where they lie."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from lowrank_kv_jax.pallas_kernels.gpu_grid import Grid
from lowrank_kv_jax.pallas_kernels.gpu_softmax import load_block
from lowrank_kv_jax.pallas_kernels.packing import Stored


def of_pages(grid: Grid) -> Grid:
    """A grid whose pipeline has as many tiles of tokens under way, for whose pages' numbers it waits as often."""
    return dataclasses.replace(grid, stages=2 * grid.stages - 1)


def load_tokens(ref, at, inside, piece: tuple[int, int], chosen_ref: Any = None, page: int = 1):
    """Some columns of tokens `at` to `at + n` of those that a head reads; zeros where not `inside` `[n]`, and beyond R.

    Args:
        ref: tokens `[S, R]`.
        chosen_ref: int32 `[C]`, the pages that are read, one behind the other; None where all are.
        page: tokens of each.
    """
    if chosen_ref is None:
        return load_block(ref, at, inside, piece)
    rows, (first, size) = rows_of_pages(chosen_ref, page, at, inside), piece
    columns = first + jnp.arange(size)
    where = tuple(jnp.broadcast_to(x, (rows.size, size)) for x in (rows[:, None], columns[None]))
    mask = inside[:, None] if first + size <= ref.shape[-1] else inside[:, None] & (columns < ref.shape[-1])[None]
    return plgpu.load(ref.at[where], mask=mask, other=0)


def chosen_arrays(keys: Stored, values: Stored) -> list[jax.Array]:
    """Chosen pages of keys and of values, int32 `[B, U, C]`; once where both are the same, whose numbers a program then
    reads once."""
    found = [x.chosen for x in (keys, values) if x.chosen is not None]
    return found[:1] if len(found) == 2 and found[0] is found[1] else found


def readers(pages: Sequence[int | None], chosen_refs: Sequence[Any]):
    """`load_tokens` of keys and of values, by references to `chosen_arrays`.

    Args:
        pages: tokens of a page of each, None where all are read.
    """
    return tuple(
        load_tokens if page is None else functools.partial(load_tokens, chosen_ref=chosen_refs[at], page=page)
        for page, at in zip(pages, (0, -1), strict=True))


def rows_of_pages(chosen_ref, page: int, at, inside):
    """Where the tokens `at` to `at + n` of chosen pages lie, int32 `[n]`; anywhere where not `inside`."""
    slots = at + jnp.arange(inside.shape[0])
    return plgpu.load(chosen_ref.at[slots // page], mask=inside, other=0) * page + slots % page
