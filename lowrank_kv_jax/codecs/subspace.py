"""What the variants of Online Subspace Projection share: bases without the queries, and a factor on the logits."""

import dataclasses
import math
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.attention.spec import AttentionSpec
from lowrank_kv_jax.codecs.lowrank import LowRank
from lowrank_kv_jax.estimators.moments import Moments, head_blocks

GAMMAS = ("unit", "sqrt_rank", "calibrated")


class SubspaceBases(NamedTuple):
    """Calibrated for one layer.

    Attributes:
        k, v: orthonormal `[J, W, R]`.
        k_energy, v_energy: mean squared coefficients `[J, R]`.
        gain: the least-squares gamma of each head less 1, `[K]`.
    """

    k: jax.Array
    v: jax.Array
    k_energy: jax.Array
    v_energy: jax.Array
    gain: jax.Array


@dataclasses.dataclass(frozen=True)
class Subspace(LowRank):
    """Abstract. Bases from keys and values alone (without the queries), and a factor gamma on the logits.

    Attributes:
        gamma: "unit"; "sqrt_rank", the paper's default sqrt(r / d), which shrinks logits even of keys that lie in the
            basis; "calibrated", least squares over the calibration set's queries and keys, for each kv head. In the
            principal basis of the keys, per head or joint, that is exactly 1 (P commutes with their second moment).
    """

    gamma: str = "unit"

    calibrated: ClassVar[bool] = True
    bases_type: ClassVar[type | None] = SubspaceBases

    def __post_init__(self):
        super().__post_init__()
        if self.gamma not in GAMMAS:
            raise ValueError(f"gamma={self.gamma!r}: allowed are {', '.join(GAMMAS)}")

    def layer_moments(self, spec, moments):
        keys = "k_pre" if self.rope == "pre" else "k"
        if self.heads == "joint":
            return getattr(moments, keys)[:, None], moments.v[:, None]
        return moments.per_head(keys, spec.kv_heads), moments.per_head("v", spec.kv_heads)

    def fit(self, spec, moments):
        sides = self.layer_moments(spec, moments)
        queries, keys = self._gamma_moments(spec, moments)
        out = []
        for layer, (k, v) in enumerate(super().fit(spec, moments)):
            energy = [
                jnp.asarray(np.einsum("jwr,jwx,jxr->jr", u, side[layer], u) / moments.tokens, jnp.float32)
                for u, side in zip((k, v), sides, strict=True)
            ]
            gain = least_squares_gamma(k, queries[layer], keys[layer]) - 1
            out.append(SubspaceBases(k, v, *energy, jnp.asarray(gain, jnp.float32)))
        return tuple(out)

    def fit_key(self, spec):
        return super().fit_key(spec) | {"fit": "pca of k and v, and gamma"}

    def _gamma_moments(self, spec: AttentionSpec, moments: Moments) -> tuple[np.ndarray, np.ndarray]:
        """Second moments of queries `[L, K, D, D]`, and of keys as they are coded `[L, J, W, W]`."""
        queries, keys = ("q_pre", "k_pre") if self.rope == "pre" else ("q", "k")
        each = self.basis_heads(spec) == spec.kv_heads
        return moments.per_head(queries, spec.kv_heads), (
            moments.per_head(keys, spec.kv_heads) if each else getattr(moments, keys)[:, None]
        )

    def gammas(self, spec: AttentionSpec, bases: SubspaceBases) -> jax.Array:
        """gamma of each kv head, float32 `[K]`."""
        if self.gamma == "calibrated":
            return 1 + bases.gain.astype(jnp.float32)
        width = spec.kv_heads // self.basis_heads(spec) * spec.head_dim
        return jnp.full((spec.kv_heads,), 1.0 if self.gamma == "unit" else math.sqrt(bases.k.shape[-1] / width))

    def scaled(self, spec, bases, q):
        if self.gamma == "unit":
            return q
        return q * jnp.repeat(self.gammas(spec, bases), spec.group_size)[:, None].astype(q.dtype)

    def as_seen(self, spec: AttentionSpec, bases: SubspaceBases, k: jax.Array) -> jax.Array:
        """Rebuilt keys `[B, K, S, D]` times gamma: what the queries see."""
        if self.gamma == "unit":
            return k
        return k * self.gammas(spec, bases)[:, None, None]


def least_squares_gamma(basis: np.ndarray, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """<l, l^> / <l^, l^>, `[K]`, of all pairs of calibrated queries and keys of a head: section 4 in closed form.

    l = q k_h and l^ = q (P k)_h for the rows h of a head, with k the keys of all heads of its group, so that the sums
    over pairs are tr(M_q (M_k P)_hh) and tr(M_q (P M_k P)_hh).

    Args:
        basis: orthonormal `[J, W, R]`.
        queries: second moments M_q `[K, D, D]`.
        keys: second moments M_k `[J, W, W]`.
    """
    u = np.asarray(basis, np.float64)
    p = u @ np.swapaxes(u, -1, -2)
    exact, squared = (
        np.einsum("kab,kba->k", queries, head_blocks(x, len(queries) // len(x)).reshape(queries.shape))
        for x in (keys @ p, p @ keys @ p)
    )
    return np.where(squared > 0, exact / np.where(squared > 0, squared, 1.0), 1.0)
