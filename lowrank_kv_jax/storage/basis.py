"""Coding tokens as coefficients in a basis.

A basis `[J, W, R]` serves J groups of kv heads; its width W is (K / J) * D, the channels of a group side by side:
J = K codes each head by itself, J = 1 all heads of the layer jointly, and anything between groups of heads. A basis
`[B, J, W, R]` belongs to the rows of a batch. Columns are orthonormal unless a method says otherwise.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from lowrank_kv_jax.storage import precise
from lowrank_kv_jax.storage.cache_dtype import roomy


def _per_row(basis: jax.Array) -> str:
    return "b" if basis.ndim == 4 else ""


def project(basis: Float[jax.Array, "... J W R"], x: Float[jax.Array, "B T K D"]) -> Float[jax.Array, "B J T R"]:
    """Coefficients `[B, J, T, R]` of tokens `x` `[B, T, K, D]`: C = X U, in the dtype of `x`; of float16, whose range
    they may leave, float32."""
    groups, width = basis.shape[-3:-1]
    x = roomy(x)
    x = x.reshape(*x.shape[:2], groups, width)
    return precise.einsum(f"btjw,{_per_row(basis)}jwr->bjtr", x, basis.astype(x.dtype))


def reconstruct(
    basis: Float[jax.Array, "... J W R"], coefficients: Float[jax.Array, "B J T R"], kv_heads: int
) -> Float[jax.Array, "B K T D"]:
    """Tokens `[B, K, T, D]` from coefficients `[B, J, T, R]`: X^ = C U^T."""
    batch, groups, tokens, _ = coefficients.shape
    x = precise.einsum(f"bjtr,{_per_row(basis)}jwr->bjtw", coefficients, basis.astype(coefficients.dtype))
    per_group = kv_heads // groups
    return x.reshape(batch, groups, tokens, per_group, -1).swapaxes(2, 3).reshape(batch, kv_heads, tokens, -1)


def split_heads(basis: Float[jax.Array, "*rows J W R"], kv_heads: int) -> Float[jax.Array, "*rows J {kv_heads}//J D R"]:
    """Split the width into (heads of the group, D): `[..., J, K / J, D, R]`."""
    *rows, groups, width, rank = basis.shape
    per_group = kv_heads // groups
    return basis.reshape(*rows, groups, per_group, width // per_group, rank)


def fold_query(
    basis: Float[jax.Array, "... J W R"], q: Float[jax.Array, "B T N D"], kv_heads: int
) -> Float[jax.Array, "B T N R"]:
    """Queries in coefficient space `[B, T, N, R]` of `q` `[B, T, N, D]`: q~ = q U_h for kv head h of the query."""
    batch, tokens, heads, dim = q.shape
    by_head = split_heads(basis, kv_heads)
    groups, per_group = by_head.shape[-4:-2]
    q = q.reshape(batch, tokens, groups, per_group, -1, dim)
    out = jnp.einsum(f"btjhgd,{_per_row(basis)}jhdr->btjhgr", q, by_head.astype(q.dtype))
    return out.reshape(batch, tokens, heads, -1)


def expand_values(
    basis: Float[jax.Array, "... J W R"], out: Float[jax.Array, "B T N R"], kv_heads: int
) -> Float[jax.Array, "B T N D"]:
    """Attention outputs in head space `[B, T, N, D]` from value-coefficient space `[B, T, N, R]`: o = o~ U_v^T."""
    batch, tokens, heads, rank = out.shape
    by_head = split_heads(basis, kv_heads)
    groups, per_group = by_head.shape[-4:-2]
    out = out.reshape(batch, tokens, groups, per_group, -1, rank)
    out = jnp.einsum(f"btjhgr,{_per_row(basis)}jhdr->btjhgd", out, by_head.astype(out.dtype))
    return out.reshape(batch, tokens, heads, -1)
