"""A prompt that attends to its own codes: low-rank projections in the place of W_k and W_v act on it, too."""

from typing import Any

import jax
import jax.numpy as jnp

from lowrank_kv_jax.attention.spec import Taps
from lowrank_kv_jax.attention.taps import half_split
from lowrank_kv_jax.method.codec import Tokens
from lowrank_kv_jax.method.layout import Layout
from lowrank_kv_jax.storage.positions import PerHead


def as_coded(
    machine: Any, layout: Layout, bases: Any, taps: Taps, positions: jax.Array, lengths: jax.Array
) -> Taps:
    """A layer's prompt as the cache will give it back: exact at the ends, between them what codes are read as.

    Codes are not rounded to bits. A basis that moves has learned of the prompt before. Channels are in half-split order.

    Args:
        machine: whose codec stores tokens one by one.
        bases: of the layer's group.
        taps: of T tokens; those behind the prompt's own stay exact.
        positions: int32 `[B, T]`.
        lengths: int32 `[B]`, of the prompts.
    """
    bases, taps, codec = machine.of_group(bases), half_split(layout.spec, taps), machine.codec
    ends, heads = machine.ends_of(layout, bases), layout.spec.kv_heads
    exact = (positions < ends.sinks) | (positions >= lengths[:, None] - ends.recent)
    store = codec.empty(layout, bases.codec, 1)
    store = codec.learn(layout, bases.codec, store, (taps,), lengths, (~exact).astype(jnp.float32))
    codes = codec.encode(layout, bases.codec, store, (Tokens(taps.k, taps.k_pre, taps.v, positions),))
    where = PerHead(jnp.broadcast_to(positions[:, None], (len(positions), heads, positions.shape[1])), None, heads)
    k, v = (x.swapaxes(1, 2) for x in codec.decode(layout, bases.codec, store, *codes, where, 0))
    here = exact[:, :, None, None]
    return taps._replace(k=jnp.where(here, taps.k, k.astype(taps.k.dtype)),
                         v=jnp.where(here, taps.v, v.astype(taps.v.dtype)))
