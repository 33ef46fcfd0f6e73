"""XLA implementation: keys coded after RoPE meet folded queries, others are rebuilt."""

from lowrank_kv_jax.attention.partial import AttnPartial
from lowrank_kv_jax.pallas_kernels.chunked_attention.folded import folded_chunks
from lowrank_kv_jax.pallas_kernels.chunked_attention.rebuilt import rebuilt_chunks


def chunked_attention(q, tokens, owner, k_bases, v_bases, *, rope, **attend) -> AttnPartial:
    """As `api.chunked_attention`."""
    if rope is None:
        return folded_chunks(q, tokens, owner, k_bases, v_bases, **attend)
    return rebuilt_chunks(q, tokens, owner, k_bases, v_bases, rope=rope, **attend)
