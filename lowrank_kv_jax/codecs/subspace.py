"""What the variants of Online Subspace Projection share: bases without the queries, and a factor on the logits."""

import dataclasses
import math
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.attention.spec import AttentionSpec
from lowrank_kv_jax.codecs.lowrank_fields import LowRankFields
from lowrank_kv_jax.codecs.principal import check_shapes, leading_bases, query_moments
from lowrank_kv_jax.estimators.moments import Moments, head_blocks
from lowrank_kv_jax.estimators.rank import rank_for_energy

GAMMAS = ("unit", "sqrt_rank", "calibrated")


class SubspaceBases(NamedTuple):
    """Calibrated for one layer.

    Attributes:
        k, v: orthonormal `[J, W, R]`.
        k_energy, v_energy: mean squared coefficients `[J, R]`.
        gain: the least-squares gamma of each head less 1, `[K]`.
        k_scales, v_scales: `[J, 1, R]`, where `k` and `v` are int8 codes in units of them; None where they are floats.
    """

    k: jax.Array
    v: jax.Array
    k_energy: jax.Array
    v_energy: jax.Array
    gain: jax.Array
    k_scales: jax.Array | None = None
    v_scales: jax.Array | None = None

    quantised = ("k", "v")

    def wide(self) -> tuple[jax.Array, jax.Array]:
        """Bases of keys and of values as floats."""
        sides = ((self.k, self.k_scales), (self.v, self.v_scales))
        k, v = (u if scales is None else u.astype(jnp.float32) * scales.astype(jnp.float32) for u, scales in sides)
        return k, v


@dataclasses.dataclass(frozen=True)
class Subspace(LowRankFields):
    """Abstract. Bases from keys and values alone (without the queries), and a factor gamma on the logits.

    Attributes:
        gamma: "unit"; "sqrt_rank", the paper's default sqrt(r / d), which shrinks logits even of keys that lie in the
            basis; "calibrated", least squares over the calibration set's queries and keys, for each kv head. In the
            principal basis of the keys, per head or joint, that is exactly 1 (P commutes with their second moment).
        head_ranks: where `energy` chooses the rank: "max", one for all heads of a layer, or "own", one for each head and
            side. Coefficients of the heads then lie side by side, as many as are needed and no padding; they are read in
            the block-diagonal joint basis, so that a query is multiplied with the coefficients of all heads.
    """

    gamma: str = "unit"
    head_ranks: str = "max"

    calibrated: ClassVar[bool] = True
    bases_type: ClassVar[type | None] = SubspaceBases

    def __post_init__(self):
        super().__post_init__()
        if self.gamma not in GAMMAS:
            raise ValueError(f"gamma={self.gamma!r}: allowed are {', '.join(GAMMAS)}")
        if self.head_ranks not in ("max", "own"):
            raise ValueError(f"head_ranks={self.head_ranks!r}: allowed are max, own")
        if self.head_ranks == "own" and (self.energy is None or self.heads != "per_head"):
            raise ValueError(f"head_ranks='own', energy={self.energy!r}, heads={self.heads!r}: ranks of each head come "
                             "from an energy, with heads='per_head'")

    def basis_heads(self, spec):
        return 1 if self.heads == "joint" or self.head_ranks == "own" else spec.kv_heads

    def check_bases(self, spec, bases):
        check_shapes(self, spec, bases)

    def gammas(self, spec: AttentionSpec, bases: SubspaceBases) -> jax.Array | None:
        """gamma of each kv head, float32 `[K]`; None where it is 1."""
        if self.gamma == "unit":
            return None
        if self.gamma == "calibrated":
            return 1 + bases.gain.astype(jnp.float32)
        return jnp.full((spec.kv_heads,), math.sqrt(bases.k.shape[-1] / self.width(spec)))


def fit_subspaces(
    codec: Subspace, spec: AttentionSpec, moments: Moments, k: np.ndarray, v: np.ndarray
) -> tuple[SubspaceBases, ...]:
    """Of each layer the principal directions of second moments `[L, J, W, W]`, float32."""
    codec.validate(spec)
    queries, keys = gamma_moments(codec, spec, moments)
    out = []
    for layer, bases in enumerate(leading_bases(codec, spec, k, v)):
        sides = []
        for u, side in zip(bases, (k, v), strict=True):
            energy = np.einsum("jwr,jwx,jxr->jr", u, side[layer], u) / moments.tokens
            energy = jnp.asarray(np.maximum(energy, 0.0), jnp.float32)  # of directions without any, rounding may say less
            if codec.head_ranks == "own":
                values = np.linalg.eigvalsh(side[layer].astype(np.float64))[..., ::-1]
                u, energy = _side_by_side(u, energy, [rank_for_energy(x, codec.energy or 1.0) for x in values])
            sides.append((u, energy))
        (u_k, k_energy), (u_v, v_energy) = sides
        out.append(SubspaceBases(u_k, u_v, k_energy, v_energy, gain_of(u_k, queries[layer], keys[layer])))
    return tuple(out)


def _side_by_side(u: jax.Array, energy: jax.Array, ranks: list[int]) -> tuple[jax.Array, jax.Array]:
    """The leading columns of each head of `[K, D, R]` as one block-diagonal basis `[1, K * D, sum of ranks]`."""
    heads, dim, _ = u.shape
    joint = np.zeros((1, heads * dim, sum(ranks)), np.float32)
    begin = 0
    for head, rank in enumerate(ranks):
        joint[0, head * dim : (head + 1) * dim, begin : begin + rank] = u[head, :, :rank]
        begin += rank
    kept = jnp.concatenate([energy[head, :rank] for head, rank in enumerate(ranks)])
    return jnp.asarray(joint), kept[None]


def subspace_key(codec: Subspace, spec: AttentionSpec) -> dict[str, Any]:
    """What decides the outcome of `fit_subspaces`."""
    own = {"head_ranks": "own"} if codec.head_ranks == "own" else {}
    return {"fit": "pca of k and v, and gamma", "rope": codec.rope, "heads": codec.heads, **codec.rank_key(spec), **own}


def gamma_moments(codec: Subspace, spec: AttentionSpec, moments: Moments) -> tuple[np.ndarray, np.ndarray]:
    """Second moments of queries `[L, K, D, D]`, and of keys as they are coded `[L, J, W, W]`."""
    keys = "k_pre" if codec.rope == "pre" else "k"
    each = codec.basis_heads(spec) == spec.kv_heads
    return query_moments(codec, spec, moments), (
        moments.per_head(keys, spec.kv_heads) if each else getattr(moments, keys)[:, None]
    )


def gain_of(basis: jax.Array, queries: np.ndarray, keys: np.ndarray) -> jax.Array:
    """`least_squares_gamma` less 1, float32 `[K]`."""
    return jnp.asarray(least_squares_gamma(np.asarray(basis), queries, keys) - 1, jnp.float32)


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
