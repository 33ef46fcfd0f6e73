"""A chunk of a prompt that is read a second time, behind itself, for the votes of `selections.reread`."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Int

from lowrank_kv_jax.attention.partial import AttnPartial
from lowrank_kv_jax.attention.rope import half_split_channels
from lowrank_kv_jax.attention.spec import Taps
from lowrank_kv_jax.method import Layout, Part, Place
from lowrank_kv_jax.method.voting import Seen, alone
from lowrank_kv_jax.methods.compose import machine_of
from lowrank_kv_jax.segments import exact as exact_tokens
from lowrank_kv_jax.selections.reread import SINKS, Past, reread_attention


def read_chunk_twice(
    method: Part, layout: Layout, place: Place, bases: Any, state: Any, taps: Taps, positions: Int[jax.Array, "B S"],
    counts: Int[jax.Array, " B"],
) -> tuple[jax.Array, Taps, Seen]:
    """Attend from a chunk and its copy to both and to a layer's cache, which stays as it is; not compiled by itself.

    Args:
        taps: of the chunk and, behind it, of its copies, S = 2 T tokens at `positions` `[B, S]`.
        counts: int32 `[B]`, how many of the T there are.

    Returns:
        Outputs `[B, 2 T, N, D]`, the chunk's taps, and what the copies attend to, for `ingest_group`.
    """
    machine, size, spec = machine_of(method), positions.shape[1] // 2, layout.spec
    first, copies = taps.part(slice(size)), taps.part(slice(size, 2 * size))
    part, _ = machine.read_chunk(layout, bases, _silent(state), first, positions[:, :size], counts, place)
    behind = positions[:, size:]
    past = Past(
        machine.past(layout, bases, state, copies.q, behind, place),
        _sinks(machine, layout, bases, state, copies.q, behind, place), positions[:, 0],
    )
    out, votes = reread_attention(
        copies.q, taps.k, taps.v, counts, **spec.logits, window=place.window, sink_logits=taps.sink_logits, past=past
    )
    whole = jnp.concatenate([part.out, out.astype(part.out.dtype)], axis=1)
    return whole, first, alone(state, votes)


def _silent(state: Any) -> Any:
    """A state that no query votes in."""
    return state.__class__(state.ends, state.store, None, None, state.gone, state.marks)


def _sinks(machine: Any, layout: Layout, bases: Any, state: Any, q: jax.Array, positions: jax.Array, place: Place):
    """Log-sum-exp `[B, T, N]` over the first tokens, as far as they are exact: -inf where none are."""
    count = min(machine.ends_of(layout, machine.of_group(bases)).sinks, SINKS)
    if not count:
        return jnp.full(q.shape[:3], -jnp.inf, jnp.float32)
    first = exact_tokens.part(state.ends[place.held], 0, count)
    q = half_split_channels(layout.spec.rope, q)
    found: AttnPartial = exact_tokens.attend(first, q, positions, **layout.spec.logits, window=place.window)
    return found.lse
