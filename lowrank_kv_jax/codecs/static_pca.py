"""Fixed bases from calibration: EigenAttention and OjaKV's static baselines."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.attention.spec import AttentionSpec
from lowrank_kv_jax.codecs.component_bits import by_component, check_widths, mean_bits
from lowrank_kv_jax.codecs.frame import Frame
from lowrank_kv_jax.codecs.lowrank import LowRank
from lowrank_kv_jax.codecs.principal import (
    Bases,
    Principal,
    check_shapes,
    leading_bases,
    query_moments,
    side_moments,
)
from lowrank_kv_jax.estimators.moments import Moments
from lowrank_kv_jax.estimators.rank_for_output import ranks_for_output
from lowrank_kv_jax.method import register


@dataclasses.dataclass(frozen=True)
class StaticBasis(LowRank):
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
class StaticPCA(StaticBasis, Principal):
    """Every token is coded, keys and values are rebuilt before attention (OjaKV, sections 3.3 and 6)."""

    sinks: int = 0
    recent: int = 0
    order: str = "reconstruct"


@register("eigen-n")
@dataclasses.dataclass(frozen=True)
class EigenN(StaticBasis, Principal):
    """StaticPCA computed in the reduced space; the two agree (OjaKV, A.3)."""

    sinks: int = 0
    recent: int = 0


@register("static-pca-h")
@dataclasses.dataclass(frozen=True)
class StaticPCAH(StaticBasis, Principal):
    """StaticPCA with sinks and recent tokens exact, OjaKV's primary baseline."""


@register("eigenattention")
@dataclasses.dataclass(frozen=True)
class EigenAttention(StaticBasis):
    """One basis for the keys of all heads of a layer, before RoPE; one for each head's values (Saxena et al., 2024).

    Attributes:
        queries: whether the basis of the keys is that of queries and keys, as in the paper; False is what its code does
            for models with rotary embeddings, keys alone.
        output_error: in the place of `rank`, a budget for the relative error of each layer's output on the calibration
            text: the layer's ranks fall by steps of 0.02 of the sum of singular values until it is reached, or 0.45 D is.
            Needs queries=False.
    """

    sinks: int = 0
    recent: int = 0
    rope: str = "pre"
    queries: bool = True
    output_error: float | None = None

    bases_type: ClassVar[type | None] = Bases
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"code": {"queries": False, "output_error": 0.025}}
    without: ClassVar[Mapping[str, str]] = {"outputs": "output_error=none"}

    def __post_init__(self):
        super().__post_init__()
        if self.heads != "per_head":
            raise ValueError(f"heads={self.heads!r}: EigenAttention codes each head by itself (per_head)")
        if self.output_error is not None:
            if not 0 < self.output_error <= 1:
                raise ValueError(f"output_error={self.output_error!r}: must lie in (0, 1]")
            if self.queries or self.rope != "pre" or self.energy is not None or mean_bits(self.bits) is not None:
                raise ValueError(f"output_error={self.output_error!r}: is measured in bases of keys alone before RoPE; "
                                 "give queries=False, rope='pre', energy=None and the same bits for all components")

    @property
    def reads(self):
        return frozenset({"moments", "outputs"}) if self.output_error is not None else frozenset({"moments"})

    def basis_heads(self, spec):
        return spec.kv_heads

    def validate(self, spec):
        self.check_model(spec)

    def check_bases(self, spec, bases):
        if bases is not None:
            check_widths(self, bases, mean_bits(self.bits))
        check_shapes(self, spec, bases, shared_key_basis=True, any_rank=self.output_error is not None)

    def fit(self, spec: AttentionSpec, moments: Moments) -> tuple[Bases, ...]:
        """Float32, of each layer.

        Raises:
            ValueError: moments without the errors of outputs that `output_error` is a budget for.
        """
        self.validate(spec)
        k, v = side_moments(self, spec, moments)
        k = np.sum(k + query_moments(self, spec, moments) if self.queries else k, axis=1, keepdims=True)
        if self.output_error is not None:
            return self._within_budget(spec, moments, k, v)
        bits, fitted = mean_bits(self.bits), tuple(Bases(*pair) for pair in leading_bases(self, spec, k, v))
        return fitted if bits is None else by_component(self, spec, moments, fitted, bits)

    def _within_budget(self, spec: AttentionSpec, moments: Moments, k: np.ndarray, v: np.ndarray) -> tuple[Bases, ...]:
        if moments.outputs is None or self.output_error is None:
            raise ValueError("eigenattention: the moments hold no errors of outputs; collect them with `moments_for`")
        whole, out = dataclasses.replace(self, output_error=None, rank=1.0, rank_k=None, rank_v=None), []
        values = ([np.linalg.eigvalsh(own.astype(np.float64))[..., ::-1] for own in side] for side in (k, v))
        for pair, of_k, of_v, error in zip(
            leading_bases(whole, spec, k, v), *values, moments.outputs.error, strict=True
        ):
            ranks = ranks_for_output(of_k[0], of_v, error, self.output_error)
            out.append(Bases(*(u[..., :rank] for u, rank in zip(pair, ranks, strict=True))))
        return tuple(out)

    def fit_key(self, spec):
        stacked = "[q; k]" if self.queries else "k"
        key = {"fit": f"pca of {stacked} of all heads together, and v", "rope": self.rope, "heads": self.heads}
        if self.output_error is not None:
            return key | {"output_error": self.output_error}
        return key | self.rank_key(spec)
