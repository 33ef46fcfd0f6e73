"""Fixed bases from calibration: EigenAttention and OjaKV's static baselines."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.codecs.lowrank import Bases, LowRank
from lowrank_kv_jax.method import register


@dataclasses.dataclass(frozen=True)
class StaticBasis(LowRank):
    """Abstract. Calibrated bases that never move."""

    calibrated: ClassVar[bool] = True


@register("static-pca")
@dataclasses.dataclass(frozen=True)
class StaticPCA(StaticBasis):
    """Every token is coded, keys and values are rebuilt before attention (OjaKV, sections 3.3 and 6)."""

    sinks: int = 0
    recent: int = 0
    order: str = "reconstruct"


@register("eigen-n")
@dataclasses.dataclass(frozen=True)
class EigenN(StaticBasis):
    """StaticPCA computed in the reduced space; the two agree (OjaKV, A.3)."""

    sinks: int = 0
    recent: int = 0


@register("static-pca-h")
@dataclasses.dataclass(frozen=True)
class StaticPCAH(StaticBasis):
    """StaticPCA with sinks and recent tokens exact, OjaKV's primary baseline."""


@register("eigenattention")
@dataclasses.dataclass(frozen=True)
class EigenAttention(StaticBasis):
    """One basis for the keys of all heads of a layer, before RoPE; one for each head's values (Saxena et al., 2024)."""

    sinks: int = 0
    recent: int = 0
    rope: str = "pre"

    shared_key_basis: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        if self.heads != "per_head":
            raise ValueError(f"heads={self.heads!r}: EigenAttention codes each head by itself (per_head)")

    def layer_moments(self, spec, moments):
        k, v = super().layer_moments(spec, moments)
        return np.sum(k, axis=1, keepdims=True), v

    def fit_key(self, spec):
        return super().fit_key(spec) | {"fit": "pca of [q; k] of all heads together, and v"}

    def starting_bases(self, spec, bases):
        return self.bases_of(bases, None)

    def bases_of(self, bases, store):
        assert bases is not None
        return Bases(jnp.broadcast_to(bases.k, (bases.v.shape[0], *bases.k.shape[1:])), bases.v)
