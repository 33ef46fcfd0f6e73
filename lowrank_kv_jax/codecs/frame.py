"""What the coefficients of a layer are read in."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from lowrank_kv_jax.attention.blockwise import spread_heads
from lowrank_kv_jax.attention.rope import rope_angles, rotate
from lowrank_kv_jax.attention.spec import AttentionSpec
from lowrank_kv_jax.attention.turning import place_in_tile
from lowrank_kv_jax.storage.basis import Basis, as_array, project, reconstruct
from lowrank_kv_jax.storage.cache_dtype import roomy
from lowrank_kv_jax.storage.positions import PerHead, Runs
from lowrank_kv_jax.storage.steps import Steps


class Frame(NamedTuple):
    """Bases, and where a codec has them means, a factor on the logits, and encoders that are not the decoders.

    Attributes:
        k, v: `[J, W, R]`, or of each row `[B, J, W, R]`; x^ = C U^T + mean.
        k_mean, v_mean: `[K, D]`, or of each row `[B, K, D]`, taken off before tokens are coded; None: there are none.
        k_encoder, v_encoder: what codes in the place of `k` and `v`; None where they do.
        gamma: factor of each kv head on the logits, float32 `[K]`; None is 1.
    """

    k: Basis
    v: Basis
    k_mean: jax.Array | None = None
    v_mean: jax.Array | None = None
    k_encoder: jax.Array | None = None
    v_encoder: jax.Array | None = None
    gamma: jax.Array | None = None

    def centred(self, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys and values `[B, T, K, D]` without their means."""
        return _minus(k, self.k_mean), _minus(v, self.v_mean)

    def code(self, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Coefficients `[B, J, T, R]` of keys and values `[B, T, K, D]`."""
        k, v = self.centred(k, v)
        return (project(self.k if self.k_encoder is None else self.k_encoder, k),
                project(self.v if self.v_encoder is None else self.v_encoder, v))

    def rebuild(self, side: str, coefficients: jax.Array, kv_heads: int) -> jax.Array:
        """Keys ("k") or values ("v") `[B, K, T, D]` from coefficients `[B, J, T, R]`."""
        rebuilt, mean = reconstruct(as_array(getattr(self, side)), coefficients, kv_heads), getattr(self, f"{side}_mean")
        return rebuilt if mean is None else rebuilt + mean.astype(rebuilt.dtype)[..., None, :]

    def keys(
        self, spec: AttentionSpec, rope: str, coefficients: jax.Array, positions: Runs | PerHead, origin: int = 0
    ) -> jax.Array:
        """Keys after RoPE `[B, K, T, D]` from coefficients of keys before it (`rope` "pre"), after it ("post"), or turned
        by their place in tiles that are counted from `origin` on ("tile"; their mean is of keys before it)."""
        frame = self.at(positions)
        if rope == "post" or spec.rope is None:
            return frame.rebuild("k", coefficients, spec.kv_heads)
        where = positions_of(positions, coefficients.shape[2], spec.kv_heads)
        if rope == "pre":
            return rotate(frame.rebuild("k", coefficients, spec.kv_heads), *rope_angles(spec.rope, where))
        keys = frame._replace(k_mean=None).rebuild("k", coefficients, spec.kv_heads)
        keys = rotate(keys, *rope_angles(spec.rope, where - place_in_tile(where, origin)))
        if self.k_mean is None:
            return keys
        mean = jnp.broadcast_to(self.k_mean.astype(keys.dtype)[..., None, :], keys.shape)
        return keys + rotate(mean, *rope_angles(spec.rope, where))

    def of_codes(self, k: Steps | None, v: Steps | None, kv_heads: int) -> "Frame":
        """What codes are read in that count in steps: steps fold into bases, zeros into means, of each row its own.

        It codes nothing; None: there are no steps, on either side.
        """
        if k is None or v is None:
            return self
        means = (self.rebuild(side, own.zero.astype(jnp.float32)[:, :, None], kv_heads)[:, :, 0]
                 for side, own in (("k", k), ("v", v)))
        bases = (as_array(basis).astype(jnp.float32) * own.step.astype(jnp.float32)[:, :, None]
                 for basis, own in ((self.k, k), (self.v, v)))
        return Frame(*bases, *means, gamma=self.gamma)

    def at(self, positions: Runs | PerHead) -> "Frame":
        """For rebuilding tokens there; of packed ones one basis over all heads, of which each slot needs its owner's."""
        if isinstance(positions, Runs) or positions.owner is None:
            return self
        return self._replace(k=one_below_the_other(as_array(self.k)), v=one_below_the_other(as_array(self.v)))


def positions_of(positions: Runs | PerHead, slots: int, kv_heads: int) -> jax.Array:
    """Of each kv head's tokens in the first slots, int32 `[B, K, S]`."""
    where = positions.at(jnp.arange(slots))[:, None] if isinstance(positions, Runs) else positions.position
    return spread_heads(where, kv_heads)


def _minus(x: jax.Array, mean: jax.Array | None) -> jax.Array:
    if mean is None:
        return x
    x = roomy(x)
    return x - for_tokens(mean).astype(x.dtype)


def for_tokens(mean: jax.Array) -> jax.Array:
    """Means `[K, D]`, or of each row `[B, K, D]`, as they broadcast over tokens `[B, T, K, D]`."""
    return mean if mean.ndim == 2 else mean[:, None]


def one_below_the_other(basis: jax.Array) -> jax.Array:
    """Bases `[J, W, R]` or `[B, J, W, R]` of J heads as one of all heads, `[1, J * W, R]` or `[B, 1, J * W, R]`."""
    return basis.reshape(*basis.shape[:-3], 1, -1, basis.shape[-1])


def as_met(q: jax.Array, gamma: jax.Array | None) -> jax.Array:
    """Queries `[B, T, N, D]` as they meet coded keys: times gamma `[K]`."""
    if gamma is None:
        return q
    return q * jnp.repeat(gamma, q.shape[2] // len(gamma))[:, None].astype(q.dtype)


def as_seen(k: jax.Array, gamma: jax.Array | None) -> jax.Array:
    """Rebuilt keys `[B, K, S, D]` as the queries see them: times gamma `[K]`."""
    return k if gamma is None else k * gamma[:, None, None]
