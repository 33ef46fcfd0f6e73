"""Taps of a decoder of your own: made from heads before RoPE, checked, and put into the order that caches hold."""

import jax
import numpy as np

from lowrank_kv_jax.attention.rope import apply_rope, half_split_channels
from lowrank_kv_jax.attention.spec import AttentionSpec, Taps

LARGEST_ERROR = 0.02
"""Of rotated keys, beside their norm: what 16 bits leave is a tenth of it, other conventions give some tenths."""


def rotary_taps(
    spec: AttentionSpec, q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array,
    sink_logits: jax.Array | None = None,
) -> Taps:
    """The taps of T tokens, rotated as `spec.rope` says.

    Args:
        q: queries before RoPE, `[B, T, N, D]`.
        k, v: keys before RoPE, and values, `[B, T, K, D]`.
        positions: int32 `[B, T]`.
        sink_logits: of the query heads, `[N]`, where `spec.sink_logits` says that there are any.
    """
    turned = apply_rope(spec.rope, q, positions), apply_rope(spec.rope, k, positions)
    return Taps(*turned, k, v, sink_logits=None if sink_logits is None else sink_logits.astype("float32"))


def half_split(spec: AttentionSpec, taps: Taps) -> Taps:
    """The same taps as caches hold them: rotary channels in half-split order."""
    if spec.rope is None or not spec.rope.interleaved:
        return taps
    q, k, k_pre = (half_split_channels(spec.rope, x) for x in (taps.q, taps.k, taps.k_pre))
    return taps._replace(q=q, k=k, k_pre=k_pre)


def check_rotation(spec: AttentionSpec, taps: Taps, positions: jax.Array) -> None:
    """Hold taps of a decoder to the RoPE that `spec` describes: nothing else tells that a cache reads them wrongly.

    Args:
        taps: of some tokens away from position 0, concrete arrays.
        positions: int32 `[B, T]`.

    Raises:
        ValueError: keys after RoPE are not the rotated keys before it.
    """
    given = np.asarray(taps.k, np.float64)
    wanted = np.asarray(apply_rope(spec.rope, taps.k_pre.astype("float32"), positions), np.float64)
    error = float(np.linalg.norm(given - wanted) / max(np.linalg.norm(wanted), 1e-30))
    if not error <= LARGEST_ERROR:
        raise ValueError(f"taps.k: differs from taps.k_pre rotated by {spec.rope} by {error:.2g} of its norm, allowed is "
                         f"{LARGEST_ERROR}; see theta, rotary_dim, scaling, and interleaved for how channels are paired")
