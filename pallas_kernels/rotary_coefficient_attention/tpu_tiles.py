"""The op on a TPU where keys were coded turned by their place in a tile, in a basis that heads share: the kernel over
coefficients after RoPE, whose queries are folded once a tile, around logits that positions alone decide."""

from typing import Any

from lowrank_kv_jax.attention.partial import AttnPartial
from lowrank_kv_jax.attention.turning import TILE, turning_logits
from lowrank_kv_jax.pallas_kernels.coefficient_attention.tpu import Met, attend_met
from lowrank_kv_jax.pallas_kernels.dispatch import Unsupported
from lowrank_kv_jax.pallas_kernels.packing import visible_range
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention.tiles import begins_of, by_component, folded


def tile_of(*stored: Any) -> int:
    """Tokens of a grid step that meet the same queries.

    Raises:
        Unsupported: a step has more of them.
    """
    if max(x.least for x in stored) > TILE:
        raise Unsupported(f"keys that are turned by their place in a tile of {TILE} tokens, of which a step has more")
    return TILE


def attend(
    q, tokens, key_basis, *, rope, kv_heads, scale, q_positions, causal, window, key_mean, origin, interpret
) -> AttnPartial:
    """As `tpu.rotary_coefficient_attention`, less what follows the attended values, and after `tiles.check`.

    Raises:
        Unsupported: what the kernel over coefficients does not read.
    """
    begin, end = visible_range(tokens, q_positions, causal, window)
    begins = begins_of(tokens, origin)
    added = None if key_mean is None else turning_logits(rope, q, key_mean, begins)
    met = Met(folded(q, by_component(key_basis, kv_heads, q.dtype), rope, begins), TILE, added)
    return attend_met(met, tokens, begin, end, scale=scale, size=tokens.keys.shape[2], interpret=interpret)
