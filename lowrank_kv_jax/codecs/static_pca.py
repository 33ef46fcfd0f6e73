"""Fixed bases from calibration: EigenAttention and OjaKV's static baselines."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from lowrank_kv_jax.codecs.frame import Frame
from lowrank_kv_jax.codecs.principal import Principal
from lowrank_kv_jax.method import register


@dataclasses.dataclass(frozen=True)
class StaticBasis(Principal):
    """Abstract. Calibrated bases that never move."""

    calibrated: ClassVar[bool] = True

    def frame(self, spec, bases, store):
        k = jnp.broadcast_to(bases.k, (bases.v.shape[0], *bases.k.shape[1:]))  # one basis of the keys serves every head
        return Frame(k, bases.v)

    def empty(self, layout, bases, size, positions=None):
        return self.empty_store(layout, bases, size, positions)

    def learn(self, layout, bases, store, taps, lengths, weight):
        return self.with_steps_of(layout, bases, store, taps, weight)


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
