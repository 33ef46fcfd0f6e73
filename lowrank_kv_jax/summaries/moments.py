"""Moment statistics of evicted tokens and their closed-form attention (MomentKV, section 4.1 and appendices A to C)."""

import jax
import jax.numpy as jnp

from lowrank_kv_jax.attention.partial import AttnPartial
from lowrank_kv_jax.storage import precise
from lowrank_kv_jax.storage.backend import on_gpu
from lowrank_kv_jax.storage.cache_dtype import narrow
from lowrank_kv_jax.storage.fixed_point import FixedPoint, fixed_point
from lowrank_kv_jax.storage.state import leaf, state

ORDERS = ("0", "1", "gaussian")
FEW = 16  # queries of a kv head
TINY = 1e-6  # entries of S~ below it in magnitude are noise and become 0 (appendix C.2)


@state
class EvictedMoments:
    """Means over the evicted tokens of each kv head, and how many they are; independent of order and mergeable.

    The paper keeps sums (equation 22). Means say the same and do not grow, so that 16 bits hold them: a sum that is many
    times a token's share no longer changes when the share is added. Products are around the means for the same reason.

    Attributes:
        count: n_e, float32 `[B, K]`.
        k_mean, v_mean: k_bar, v_bar `[B, K, D]`.
        covariance: S~ / n_e, the mean of (v - v_bar) (k - k_bar)^T `[B, K, D, D]`; None for order 0.
        k_covariance: the mean of (k - k_bar) (k - k_bar)^T `[B, K, D, D]`; only of "gaussian".
        longest: max ||k||, float32 `[B, K]`; only of "gaussian".

    Covariances may be `FixedPoint`; the other leaves are arrays.
    """

    count: jax.Array = leaf("batch", "kv_heads", kind="moments")
    k_mean: jax.Array = leaf("batch", "kv_heads", "head_dim", kind="moments")
    v_mean: jax.Array = leaf("batch", "kv_heads", "head_dim", kind="moments")
    covariance: jax.Array | FixedPoint | None = leaf("batch", "kv_heads", "head_dim", None, kind="moments")
    k_covariance: jax.Array | FixedPoint | None = leaf("batch", "kv_heads", "head_dim", None, kind="moments")
    longest: jax.Array | None = leaf("batch", "kv_heads", kind="moments")


def empty_moments(batch: int, kv_heads: int, head_dim: int, order: str, dtype=jnp.float32) -> EvictedMoments:
    """Statistics of nothing. Means are of `dtype`; counts and lengths are float32 always.

    Of int16 covariances are: numbers with an exponent for each row, as `FixedPoint` has them. Means k_bar and v_bar, few
    beside them, are float32 then.
    """
    coded, gaussian = jnp.dtype(dtype) == jnp.int16, order == "gaussian"
    dtype = jnp.float32 if coded else dtype

    def zeros(*shape, of=dtype):
        return jnp.zeros((batch, kv_heads, *shape), of)

    def square():
        return fixed_point(zeros(head_dim, head_dim)) if coded else zeros(head_dim, head_dim)

    return EvictedMoments(
        zeros(of=jnp.float32), zeros(head_dim), zeros(head_dim), None if order == "0" else square(),
        square() if gaussian else None, zeros(of=jnp.float32) if gaussian else None,
    )


def update(moments: EvictedMoments, k: jax.Array, v: jax.Array, weight: jax.Array) -> EvictedMoments:
    """Take in evicted tokens (equation 25).

    Args:
        k, v: `[B, K, T, D]`, or `[B, 1, T, D]` of all heads together; keys after RoPE.
        weight: `[B, K, T]`, 1 for each token that head k evicts, else 0.
    """
    k, v, weight = (x.astype(jnp.float32) for x in (k, v, weight))
    there = weight[..., None] > 0
    k, v = (jnp.where(there, x, 0.0) for x in (k, v))  # slots that hold nothing may hold anything
    count = weight.sum(-1)
    each = 1 / jnp.maximum(count, 1.0)[..., None]
    keys, values = k.sum(2) * each, v.sum(2) * each
    k_off, v_off = (jnp.where(there, x - mean[:, :, None], 0.0) for x, mean in ((k, keys), (v, values)))

    def outer(x, y):
        return precise.einsum("bktd,bkte->bkde", x, y) * each[..., None]

    return combine(moments, EvictedMoments(
        count, keys, values, None if moments.covariance is None else outer(v_off, k_off),
        None if moments.k_covariance is None else outer(k_off, k_off),
        None if moments.longest is None else jnp.max(jnp.linalg.norm(k, axis=-1), axis=-1, initial=0.0),
    ))


def combine(a: EvictedMoments, b: EvictedMoments) -> EvictedMoments:
    """Statistics of the union of two disjoint sets, in the dtypes of the first (Chan, Golub and LeVeque, 1983)."""
    count = a.count + b.count
    share = (b.count / jnp.maximum(count, 1.0))[..., None]
    off = {name: _float32(getattr(b, name)) - _float32(getattr(a, name)) for name in ("k_mean", "v_mean")}

    def mean(name: str) -> jax.Array:
        own = getattr(a, name)
        return narrow(_float32(own) + share * off[name], own.dtype)

    def around(name: str, x: str, y: str) -> jax.Array | FixedPoint | None:
        own, other = getattr(a, name), getattr(b, name)
        if own is None or other is None:
            return None
        between = off[x][..., :, None] * off[y][..., None, :]
        part = share[..., None]
        return _like(own, (1 - part) * (_float32(own) + part * between) + part * _float32(other))

    longest = None if a.longest is None or b.longest is None else jnp.maximum(a.longest, b.longest)
    return EvictedMoments(count, mean("k_mean"), mean("v_mean"), around("covariance", "v_mean", "k_mean"),
                          around("k_covariance", "k_mean", "k_mean"), longest)


def _met(q: jax.Array, slope: jax.Array) -> jax.Array:
    """`[B, K, M, D]` of queries `[B, K, M, D]` and slopes `[B, K, D, D]`. On a GPU a product would have slopes written,
    scaled; a sum of few queries takes them as they are stored."""
    if on_gpu() and q.shape[2] <= FEW:
        return jnp.sum(q[:, :, :, None] * slope[:, :, None], axis=-1)
    return jnp.einsum("bkme,bkde->bkmd", q, slope)


def affine_model(moments: EvictedMoments, scale: float) -> tuple[jax.Array, jax.Array | None]:
    """v_bar `[B, K, D]` and S~ / (n_e sqrt d) `[B, K, D, D]` (equation 24), zero where nothing was evicted."""
    mean = _float32(moments.v_mean)
    if moments.covariance is None:
        return mean, None
    slope = _float32(moments.covariance)
    return mean, jnp.where(jnp.abs(slope) * moments.count[..., None, None] < TINY, 0.0, slope) * scale


def _float32(x: jax.Array | FixedPoint) -> jax.Array:
    return x.widened() if isinstance(x, FixedPoint) else x.astype(jnp.float32)


def _like(held: jax.Array | FixedPoint, x: jax.Array) -> jax.Array | FixedPoint:
    """`x` as `held` is stored."""
    return fixed_point(x) if isinstance(held, FixedPoint) else narrow(x, held.dtype)


def partial(moments: EvictedMoments, q: jax.Array, scale: float) -> AttnPartial:
    """Attention over the evicted tokens, approximated: f^_E of equation 9 with Z^_E of equation 11, in the log domain.

    With `k_covariance`: log Z^ = log n_e + q.k_bar / sqrt d + q^T Sigma q / (2 d), at most
    log n_e + ||q|| max ||k|| / sqrt d, exact for jointly Gaussian keys and values.

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
    lse = jnp.einsum("bkmd,bkd->bkm", q, _float32(moments.k_mean)) * scale
    if moments.k_covariance is not None and moments.longest is not None:
        second = jnp.einsum("bkmd,bkde,bkme->bkm", q, _float32(moments.k_covariance), q)
        variance = jnp.maximum(second * scale**2, 0.0)
        most = jnp.linalg.norm(q, axis=-1) * moments.longest[..., None] * scale
        lse = jnp.minimum(lse + variance / 2, most)
    out = jnp.broadcast_to(mean[:, :, None], q.shape)
    if slope is not None:
        out = out + _met(q, slope)
    some = (moments.count > 0)[..., None]
    lse = jnp.where(some, lse + jnp.log(count), -jnp.inf)
    out = jnp.where(some[..., None], out, 0.0)

    def heads_last(x):
        x = x.reshape(batch, kv_heads, queries, -1, *x.shape[3:])
        return x.swapaxes(1, 2).reshape(batch, queries, heads, *x.shape[4:])

    return AttnPartial(heads_last(out), heads_last(lse))
