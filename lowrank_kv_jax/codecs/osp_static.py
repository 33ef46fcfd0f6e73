"""Online Subspace Projection, static: calibrated bases for all tokens."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.codecs.frame import Frame
from lowrank_kv_jax.codecs.lowrank import LowRank
from lowrank_kv_jax.codecs.principal import side_moments
from lowrank_kv_jax.codecs.subspace import Subspace, SubspaceBases, fit_subspaces, gain_of, gamma_moments, subspace_key
from lowrank_kv_jax.estimators.rank import rank_for_energy
from lowrank_kv_jax.method import register


def _side_by_side_bases(u: jax.Array, energy: jax.Array, ranks: list[int]) -> tuple[jax.Array, jax.Array]:
    """The leading columns of each head of `[K, D, R]` as one block-diagonal basis `[1, K * D, sum of ranks]`."""
    heads, dim, _ = u.shape
    joint = np.zeros((1, heads * dim, sum(ranks)), np.float32)
    begin = 0
    for head, rank in enumerate(ranks):
        joint[0, head * dim : (head + 1) * dim, begin : begin + rank] = u[head, :, :rank]
        begin += rank
    kept = jnp.concatenate([energy[head, :rank] for head, rank in enumerate(ranks)])
    return jnp.asarray(joint), kept[None]


@register("osp-static")
@dataclasses.dataclass(frozen=True)
class StaticSubspace(Subspace, LowRank):
    """The paper's static variant (section 10): calibrated bases for all tokens, sinks and recent tokens exact.

    Attributes:
        head_ranks: where `energy` chooses the rank: "max", one for all heads of a layer, or "own", one for each head and
            side. Coefficients of the heads then lie side by side, as many as are needed and no padding; their basis is
            the block-diagonal joint one, so that a query is multiplied with the coefficients of all heads.
    """

    head_ranks: str = "max"

    waters: ClassVar[bool] = False

    def __post_init__(self):
        super().__post_init__()
        if self.head_ranks not in ("max", "own"):
            raise ValueError(f"head_ranks={self.head_ranks!r}: allowed are max, own")
        if self.head_ranks == "own" and (self.energy is None or self.heads != "per_head"):
            raise ValueError(f"head_ranks='own', energy={self.energy!r}, heads={self.heads!r}: ranks of each head come "
                             "from an energy, with heads='per_head'")

    def basis_heads(self, spec):
        return 1 if self.heads == "joint" or self.head_ranks == "own" else spec.kv_heads

    def validate(self, spec):
        self.check_model(spec)

    def fit(self, spec, moments):
        sides = side_moments(self, spec, moments)
        if self.head_ranks == "max":
            return fit_subspaces(self, spec, moments, *sides)
        widest = fit_subspaces(dataclasses.replace(self, head_ranks="max"), spec, moments, *sides)
        return tuple(
            self._own_ranks(bases, side, gamma)
            for bases, side, gamma in zip(
                widest, zip(*sides, strict=True), zip(*gamma_moments(self, spec, moments), strict=True), strict=True
            )
        )

    def _own_ranks(self, bases: SubspaceBases, sides, gamma) -> SubspaceBases:
        """Of each head as many columns as it needs.

        Args:
            sides: second moments of keys and values `[K, D, D]`.
            gamma: what `gain_of` reads.
        """
        joined = []
        for u, energy, moment in zip(bases[:2], bases[2:4], sides, strict=True):
            values = np.linalg.eigvalsh(moment.astype(np.float64))[..., ::-1]
            joined.append(_side_by_side_bases(u, energy, [rank_for_energy(x, self.energy) for x in values]))
        (k, k_energy), (v, v_energy) = joined
        return SubspaceBases(k, v, k_energy, v_energy, gain_of(k, *gamma))

    def fit_key(self, spec):
        return subspace_key(self, spec) | ({"head_ranks": "own"} if self.head_ranks == "own" else {})

    def frame(self, spec, bases, store):
        return Frame(bases.k, bases.v, gamma=self.gammas(spec, bases))

    def empty(self, layout, bases, size, positions=None):
        return self.empty_store(layout, bases, size, positions)
