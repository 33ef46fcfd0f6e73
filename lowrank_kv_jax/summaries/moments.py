"""Moment statistics of evicted tokens and their closed-form attention (MomentKV, section 4.1 and appendices A to C)."""

import jax
import jax.numpy as jnp

from lowrank_kv_jax.attention.partial import AttnPartial
from lowrank_kv_jax.storage.state import leaf, state

ORDERS = ("0", "1", "gaussian")
TINY = 1e-6  # entries of S~ below it in magnitude are noise and become 0 (appendix C.2)


@state
class MomentSums:
    """Sums over the evicted tokens of each kv head; additive, so independent of order and mergeable (equation 22).

    Attributes:
        count: n_e, float32 `[B, K]`.
        keys, values: s_k, s_v `[B, K, D]`.
        products: S = sum v k^T `[B, K, D, D]`; None for order 0.
        squares: sum k k^T `[B, K, D, D]`; only of "gaussian".
        longest: max ||k||, float32 `[B, K]`; only of "gaussian".
    """

    count: jax.Array = leaf("batch", "kv_heads", kind="moments")
    keys: jax.Array = leaf("batch", "kv_heads", "head_dim", kind="moments")
    values: jax.Array = leaf("batch", "kv_heads", "head_dim", kind="moments")
    products: jax.Array | None = leaf("batch", "kv_heads", "head_dim", None, kind="moments")
    squares: jax.Array | None = leaf("batch", "kv_heads", "head_dim", None, kind="moments")
    longest: jax.Array | None = leaf("batch", "kv_heads", kind="moments")


def empty_moments(batch: int, kv_heads: int, head_dim: int, order: str, dtype=jnp.float32) -> MomentSums:
    """Statistics of nothing. Sums are of `dtype`; counts and lengths are float32 always."""
    def zeros(*shape, of=dtype):
        return jnp.zeros((batch, kv_heads, *shape), of)

    square = (head_dim, head_dim)
    gaussian = order == "gaussian"
    return MomentSums(
        zeros(of=jnp.float32), zeros(head_dim), zeros(head_dim), None if order == "0" else zeros(*square),
        zeros(*square) if gaussian else None, zeros(of=jnp.float32) if gaussian else None,
    )


def update(moments: MomentSums, k: jax.Array, v: jax.Array, weight: jax.Array) -> MomentSums:
    """Take in evicted tokens (equation 25).

    Args:
        k, v: `[B, K, T, D]`, or `[B, 1, T, D]` of all heads together; keys after RoPE.
        weight: `[B, K, T]`, 1 for each token that head k evicts, else 0.
    """
    k, v, weight = (x.astype(jnp.float32) for x in (k, v, weight))
    k, v = (jnp.where(weight[..., None] > 0, x, 0.0) for x in (k, v))  # slots that hold nothing may hold anything
    high = jax.lax.Precision.HIGHEST

    def outer(x, y):
        return jnp.einsum("bktd,bkte->bkde", x, y, precision=high)

    def add(old, new):
        return None if old is None else (old.astype(jnp.float32) + new).astype(old.dtype)

    lengths = jnp.max(jnp.linalg.norm(k, axis=-1), axis=-1, initial=0.0)
    return MomentSums(
        moments.count + weight.sum(-1), add(moments.keys, k.sum(2)), add(moments.values, v.sum(2)),
        add(moments.products, outer(v, k)), None if moments.squares is None else add(moments.squares, outer(k, k)),
        None if moments.longest is None else jnp.maximum(moments.longest, lengths),
    )


def combine(a: MomentSums, b: MomentSums) -> MomentSums:
    """Statistics of the union of two disjoint sets."""
    longest = None if a.longest is None or b.longest is None else jnp.maximum(a.longest, b.longest)
    sums = {}
    for name in ("count", "keys", "values", "products", "squares"):
        x, y = getattr(a, name), getattr(b, name)
        sums[name] = None if x is None or y is None else x + y
    return MomentSums(**sums, longest=longest)


def affine_model(moments: MomentSums, scale: float) -> tuple[jax.Array, jax.Array | None]:
    """v_bar `[B, K, D]` and S~ / (n_e sqrt d) `[B, K, D, D]` (equation 24), zero where nothing was evicted."""
    count = jnp.maximum(moments.count, 1.0)[..., None]
    mean = moments.values.astype(jnp.float32) / count
    if moments.products is None:
        return mean, None
    centred = moments.products.astype(jnp.float32) - mean[..., :, None] * moments.keys.astype(jnp.float32)[..., None, :]
    centred = jnp.where(jnp.abs(centred) < TINY, 0.0, centred)
    return mean, centred * (scale / count[..., None])


def partial(moments: MomentSums, q: jax.Array, scale: float) -> AttnPartial:
    """Attention over the evicted tokens, approximated: f^_E of equation 9 with Z^_E of equation 11, in the log domain.

    With `squares`: log Z^ = log n_e + q.k_bar / sqrt d + q^T Sigma q / (2 d), at most log n_e + ||q|| max ||k|| / sqrt d,
    exact for jointly Gaussian keys and values.

    Args:
        q: `[B, T, N, D]`, after RoPE.
        scale: 1 / sqrt d.

    Returns:
        Partial; empty (lse = -inf) where nothing was evicted.
    """
    batch, queries, heads, dim = q.shape
    kv_heads = moments.count.shape[1]
    q = q.astype(jnp.float32).reshape(batch, queries, kv_heads, heads // kv_heads, dim)
    q = q.swapaxes(1, 2).reshape(batch, kv_heads, -1, dim)
    count = jnp.maximum(moments.count, 1.0)[..., None]
    mean, slope = affine_model(moments, scale)
    lse = jnp.einsum("bkmd,bkd->bkm", q, moments.keys.astype(jnp.float32)) * (scale / count)
    if moments.squares is not None and moments.longest is not None:
        second = jnp.einsum("bkmd,bkde,bkme->bkm", q, moments.squares.astype(jnp.float32) / count[..., None], q)
        variance = jnp.maximum(second * scale**2 - lse**2, 0.0)
        most = jnp.linalg.norm(q, axis=-1) * moments.longest[..., None] * scale
        lse = jnp.minimum(lse + variance / 2, most)
    out = jnp.broadcast_to(mean[:, :, None], q.shape)
    if slope is not None:
        out = out + jnp.einsum("bkme,bkde->bkmd", q, slope)
    some = (moments.count > 0)[..., None]
    lse = jnp.where(some, lse + jnp.log(count), -jnp.inf)
    out = jnp.where(some[..., None], out, 0.0)

    def heads_last(x):
        x = x.reshape(batch, kv_heads, queries, -1, *x.shape[3:])
        return x.swapaxes(1, 2).reshape(batch, queries, heads, *x.shape[4:])

    return AttnPartial(heads_last(out), heads_last(lse))
