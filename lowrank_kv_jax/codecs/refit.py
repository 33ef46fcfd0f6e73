"""A basis that was fitted to a prompt's tokens, fitted anew to them, as far as they are stored, and to further ones."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lowrank_kv_jax.estimators.row_steps import fitted_steps
from lowrank_kv_jax.method.layout import Layout
from lowrank_kv_jax.segments import coded as coded_tokens
from lowrank_kv_jax.storage import precise
from lowrank_kv_jax.storage.basis import project
from lowrank_kv_jax.storage.positions import PerHead
from lowrank_kv_jax.storage.quantised import read_basis, read_tokens
from lowrank_kv_jax.storage.steps import Steps


class Refitted(NamedTuple):
    """Stored coefficients, carried over; the basis as it is stored; and what codes count in, if in anything."""

    codes: Any
    basis: Any
    steps: Steps | None


def refit(
    layout: Layout, held: Any, side: str, basis: Any, steps: Steps | None, x: jax.Array, weight: jax.Array,
    moment: jax.Array, fit: Callable[[jax.Array], Any],
) -> Refitted:
    """The side `side` of a segment in a basis for what it holds and for new tokens; rows without any keep theirs.

    Args:
        held: the segment, with `length` and `positions`.
        basis: as it is stored, `[B, J, W, R]`.
        x: new tokens `[B, T, J, W]`, zero where there is none.
        weight: float32 `[B, T]`, 1 where there is one.
        moment: their second moment `[B, J, W, W]`.
        fit: from a second moment to a basis as it is stored.
    """
    rows, stored, before = jnp.sum(weight, axis=1) > 0, getattr(held, side), read_basis(basis)
    old, packed = there(held, side, steps), isinstance(held.positions, PerHead) and held.positions.owner is not None
    if packed:
        mine = held.positions.owner == jnp.arange(before.shape[1])[:, None]
        old = jnp.where(mine[..., None], old, 0.0)
    inner = precise.gram(old)
    found = fit(precise.einsum("bjwr,bjrp,bjvp->bjwv", before, inner, before) + moment)
    moved = in_rows(rows, found, basis)
    now, after = read_basis(moved), None
    if steps is not None and packed:
        after = steps.moved(coded_tokens.change_of_basis(before, now), rows)
    elif steps is not None:
        carried = precise.matmul(old, coded_tokens.change_of_basis(before, now))
        every = jnp.concatenate([carried, project(now, x)], axis=2)
        counts = jnp.concatenate([slots(held, side), weight], axis=1).astype(jnp.float32)
        after = in_rows(rows, fitted_steps(every, counts, stored.runs, layout.dtype), steps)
    return Refitted(coded_tokens.transport(held, side, before, now, steps, after), moved, after)


def there(held: Any, side: str, steps: Steps | None) -> jax.Array:
    """Stored coefficients float32 `[B, J, S, R]`, zero in free slots."""
    x = read_tokens(getattr(held, side)).astype(jnp.float32)
    x = x if steps is None else steps.widen(x)
    return jnp.where(slots(held, side)[:, None, :, None], x, 0.0)


def slots(held: Any, side: str) -> jax.Array:
    """Which slots hold a token, bool `[B, S]`."""
    return jnp.arange(getattr(held, side).shape[2]) < held.length[:, None]


def in_rows(rows: jax.Array, new: Any, old: Any) -> Any:
    """Arrays `[B, ...]` of `new` in these rows bool `[B]`, of `old` in the others."""
    return jax.tree.map(lambda now, before: jnp.where(rows.reshape(-1, *(1,) * (now.ndim - 1)), now, before), new, old)
