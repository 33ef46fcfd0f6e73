"""Attention over coefficients, in the frame that they are read in."""

from typing import Any

import jax
import jax.numpy as jnp

from lowrank_kv_jax.attention.partial import AttnPartial
from lowrank_kv_jax.attention.spec import AttentionSpec
from lowrank_kv_jax.codecs.frame import Frame, as_met, for_tokens
from lowrank_kv_jax.method.layout import Place
from lowrank_kv_jax.pallas_kernels.coefficient_attention import coefficient_attention
from lowrank_kv_jax.pallas_kernels.expanded_values import expanded_values
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention import rotary_coefficient_attention
from lowrank_kv_jax.storage.basis import as_array, fold_query
from lowrank_kv_jax.storage.cached_tokens import Beside, CachedTokens


def attend(
    spec: AttentionSpec, frame: Frame, tokens: CachedTokens, q: jax.Array, positions: jax.Array, place: Place, *,
    folds: bool, rotates: bool, reduced: bool = True, origin: int | None = None, beside: Beside | None = None,
) -> AttnPartial:
    """Attention of queries `[B, T, N, D]` at `positions` `[B, T]` over coefficients, all of which lie before them.

    Args:
        folds: whether logits are products in coefficient space; otherwise keys are rebuilt block by block.
        rotates: whether rebuilt keys are then rotated.
        origin: of keys that were coded turned by their place in tiles, the position that these are counted from.
        reduced: whether values are attended as coefficients, or rebuilt too.
        beside: other tokens to attend to.
    """
    q = as_met(q, frame.gamma)
    common: dict[str, Any] = dict(**spec.logits, q_positions=positions, causal=False, window=place.window)
    if folds and reduced and (frame.k_mean is None or spec.logit_cap is None):
        out, lse = coefficient_attention(fold_query(frame.k, q, spec.kv_heads), tokens, **common)
        if frame.k_mean is not None:  # one number a query and head: it shifts the logits of all these tokens alike
            mean = for_tokens(jnp.repeat(frame.k_mean.astype(jnp.float32), spec.group_size, axis=-2))
            lse = lse + spec.scale * (q.astype(jnp.float32) * mean).sum(-1)
    else:
        use = frame.at(tokens.positions)
        out, lse = rotary_coefficient_attention(
            q, tokens, use.k, rope=spec.rope if rotates else None, kv_heads=spec.kv_heads,
            value_basis=None if reduced else as_array(use.v), key_mean=use.k_mean, origin=origin, **common,
        )
    given = dict(mean=frame.v_mean, beside=beside, **spec.logits)
    return expanded_values(frame.v if reduced else None, AttnPartial(out, lse), spec.kv_heads, **given)
