"""Bases of principal directions: the leading eigenvectors of calibrated second moments."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.attention.spec import AttentionSpec
from lowrank_kv_jax.codecs.component_bits import by_component, check_widths, mean_bits
from lowrank_kv_jax.codecs.lowrank import LowRank
from lowrank_kv_jax.codecs.lowrank_fields import LowRankFields
from lowrank_kv_jax.codecs.widths import Widths, with_restored_widths, with_saved_widths
from lowrank_kv_jax.estimators.moments import Moments
from lowrank_kv_jax.estimators.rank import rank_for_energy


class Bases(NamedTuple):
    """Orthonormal bases of one layer.

    Attributes:
        k, v: `[J, W, Rk]`, `[J', W, Rv]`, or with a leading row axis B.
        k_scale, v_scale: standard deviations of the coefficients `[J, R]` where components have bits of their own; None
            otherwise.
        k_zero, v_zero: their means.
        widths: bits of the components.
    """

    k: jax.Array
    v: jax.Array
    k_scale: jax.Array | None = None
    v_scale: jax.Array | None = None
    k_zero: jax.Array | None = None
    v_zero: jax.Array | None = None
    widths: Widths | None = None

    def saved(self) -> dict[str, jax.Array]:
        """As arrays by name."""
        return with_saved_widths(self)

    @classmethod
    def restored(cls, arrays: dict[str, jax.Array]) -> "Bases":
        """What `saved` returned."""
        return cls(**dict.fromkeys(cls._fields) | with_restored_widths(arrays))  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class Principal(LowRank):
    """Abstract. Calibrated bases are of queries and keys stacked, [Q; K], and of values (OjaKV, A.2)."""

    bases_type: ClassVar[type | None] = Bases

    def basis_heads(self, spec):
        return 1 if self.heads == "joint" else spec.kv_heads

    def validate(self, spec):
        self.check_model(spec)

    def check_bases(self, spec, bases):
        if bases is not None:
            check_widths(self, bases, mean_bits(self.bits))
        check_shapes(self, spec, bases)

    def fit(self, spec: AttentionSpec, moments: Moments) -> tuple[Bases, ...]:
        """Float32, of each layer."""
        self.validate(spec)
        (k, v), queries = side_moments(self, spec, moments), query_moments(self, spec, moments)
        if self.heads == "per_head":
            k = k + queries
        else:
            k = np.array(k)
            for head in range(spec.kv_heads):
                block = slice(head * spec.head_dim, (head + 1) * spec.head_dim)
                k[:, 0, block, block] += queries[:, head]
        bits, fitted = mean_bits(self.bits), tuple(Bases(*pair) for pair in leading_bases(self, spec, k, v))
        return fitted if bits is None else by_component(self, spec, moments, fitted, bits)

    def fit_key(self, spec):
        """Methods with the same ranks, RoPE side and heads share their bases, whatever they do with them."""
        return {"fit": "pca of [q; k] and v", "rope": self.rope, "heads": self.heads, **self.rank_key(spec)}


def side_moments(codec: LowRankFields, spec: AttentionSpec, moments: Moments) -> tuple[np.ndarray, np.ndarray]:
    """Second moments `[L, J, W, W]` of keys as they are coded and of values, head by head or of all heads jointly."""
    keys = "k_pre" if codec.rope == "pre" else "k"
    if codec.heads == "joint":
        return getattr(moments, keys)[:, None], moments.v[:, None]
    return moments.per_head(keys, spec.kv_heads), moments.per_head("v", spec.kv_heads)


def query_moments(codec: LowRankFields, spec: AttentionSpec, moments: Moments) -> np.ndarray:
    """Second moments `[L, K, D, D]` of the queries of each kv head, as they meet coded keys."""
    return moments.per_head("q_pre" if codec.rope == "pre" else "q", spec.kv_heads)


def leading_bases(
    codec: LowRankFields, spec: AttentionSpec, k: np.ndarray, v: np.ndarray
) -> list[tuple[jax.Array, jax.Array]]:
    """Of each layer the leading eigenvectors of second moments `[L, J, W, W]`, float32, as many as the fields ask for."""
    out = []
    for sides in zip(k, v, strict=True):
        pair = []
        for side, moment in enumerate(sides):
            values, vectors = np.linalg.eigh(moment.astype(np.float64))
            values, vectors = values[..., ::-1], vectors[..., ::-1]
            rank = rank_for_energy(values, codec.energy) if codec.energy else codec.ranks(spec)[side]
            pair.append(jnp.asarray(vectors[..., :rank], jnp.float32))
        out.append((pair[0], pair[1]))
    return out


def check_shapes(
    codec: LowRankFields, spec: AttentionSpec, bases: Any, shared_key_basis: bool = False, any_rank: bool = False
) -> None:
    """`check_bases`: heads, width and rank; ranks that `energy` or bits chose may be any. Raises ValueError.

    Args:
        shared_key_basis: whether the keys of all heads may lie in one basis.
        any_rank: whether something else chose ranks.
    """
    if bases is None:
        return
    heads, width = codec.basis_heads(spec), codec.width(spec)
    fixed = codec.energy is None and mean_bits(codec.bits) is None and not any_rank
    for side, rank in zip("kv", codec.ranks(spec) if fixed else (None, None), strict=True):
        *_, found_heads, found_width, found = getattr(bases, side).shape
        allowed = (1, heads) if shared_key_basis and side == "k" else (heads,)
        if found_heads not in allowed or found_width != width or rank not in (None, found):
            raise ValueError(
                f"bases.{side} has {found_heads} heads of [{found_width}, {found}]; {codec.name} with these settings "
                f"takes {heads} of [{width}, {rank or 'any rank'}]: calibrate for it"
            )
