"""Online Subspace Projection, static: calibrated bases for all tokens."""

import dataclasses
from typing import ClassVar

from lowrank_kv_jax.codecs.frame import Frame
from lowrank_kv_jax.codecs.lowrank import LowRank
from lowrank_kv_jax.codecs.principal import side_moments
from lowrank_kv_jax.codecs.subspace import Subspace, SubspaceBases, fit_subspaces, subspace_key
from lowrank_kv_jax.method import register
from lowrank_kv_jax.storage.quantised import quantise


@register("osp-static")
@dataclasses.dataclass(frozen=True)
class StaticSubspace(Subspace, LowRank):
    """The paper's static variant (section 10): calibrated bases for all tokens, sinks and recent tokens exact.

    Attributes:
        basis_dtype: of the calibrated bases, which all requests share: "int8", with a scale for each direction; None is
            the dtype that they are calibrated in.
    """

    basis_dtype: str | None = None

    waters: ClassVar[bool] = False

    def __post_init__(self):
        super().__post_init__()
        if self.basis_dtype not in (None, "int8"):
            raise ValueError(f"basis_dtype={self.basis_dtype!r}: allowed are None, int8")

    def validate(self, spec):
        self.check_model(spec)

    def fit(self, spec, moments):
        fitted = fit_subspaces(self, spec, moments, *side_moments(self, spec, moments))
        return tuple(map(_in_bytes, fitted)) if self.basis_dtype else fitted

    def fit_key(self, spec):
        return subspace_key(self, spec) | ({"basis_dtype": self.basis_dtype} if self.basis_dtype else {})

    def frame(self, spec, bases, store):
        k, v = bases.wide()
        return Frame(k, v, gamma=self.gammas(spec, bases))

    def empty(self, layout, bases, size, positions=None):
        return self.empty_store(layout, bases, size, positions)


def _in_bytes(bases: SubspaceBases) -> SubspaceBases:
    (k, k_scales), (v, v_scales) = (quantise(u, axis=-2) for u in (bases.k, bases.v))
    return bases._replace(k=k, v=v, k_scales=k_scales, v_scales=v_scales)
