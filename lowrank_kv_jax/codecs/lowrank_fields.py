"""Fields of the low-rank codecs, and what follows from them alone."""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import numpy as np

from lowrank_kv_jax.attention.spec import AttentionSpec, Taps
from lowrank_kv_jax.codecs.component_bits import check_bits, mean_bits
from lowrank_kv_jax.estimators.rank import check_rank, rank_for_energy, resolve_rank
from lowrank_kv_jax.method.codec import Codec, Tokens


@dataclasses.dataclass(frozen=True)
class LowRankFields(Codec):
    """Abstract. Fields common to all low-rank methods.

    Attributes:
        rank: columns of a basis (int), or a fraction of its width (float): D per head, K * D joint.
        rank_k, rank_v: override `rank` for keys or values.
        energy: instead of `rank`: the smallest rank that keeps this share of the calibrated energy in every head of
            the layer (OjaKV, A.2); only for methods whose bases are calibrated.
        rope: "post" codes keys after RoPE and attends in coefficient space; "pre" codes them before (three to five
            times more compressible) and rebuilds and rotates them on read. Without a rotary embedding it is all one.
        heads: "per_head", or "joint" for one basis over all heads of the layer.
        sinks, recent: exact tokens at both ends.
        recent_of: "ring", the most recent tokens at any time, or "prompt", the prompt's last ones for good.
        decoded: "coded", tokens that leave the recent window are coded too; "exact", whatever is appended after the
            prompt stays exact.
        order: "reduced" attends in coefficient space, "reconstruct" rebuilds keys and values block by block first
            (both orders of OjaKV, A.3; keys coded before RoPE are always rebuilt).
        bits: 8, 4 or 2 quantises the coefficients, a scale for each component of every 128 tokens; any other number up to
            8, say 2.5, is the mean of bits that components get by their variances, 8, 4, 2, 1 or none, in steps that all
            tokens of a row share; None keeps them in the cache's dtype.
    """

    rank: int | float | None = 0.5
    rank_k: int | float | None = None
    rank_v: int | float | None = None
    energy: float | None = None
    rope: str = "post"
    heads: str = "per_head"
    sinks: int = 32
    recent: int = 32
    recent_of: str = "ring"
    decoded: str = "coded"
    order: str = "reduced"
    bits: int | float | None = None

    exact_at: ClassVar[Mapping[str, Any] | None] = {"rank": 1.0, "sinks": 4, "recent": 8}
    small: ClassVar[Mapping[str, Any]] = {"sinks": 4, "recent": 8}
    one_of: ClassVar[tuple[tuple[str, ...], ...]] = (("rank", "rank_k", "rank_v"), ("energy",))
    rebuilds: ClassVar[bool] = True
    waters: ClassVar[bool] = False
    """Whether components may have bits of their own, a mean that is none of `TOKEN_BITS`."""

    def __post_init__(self):
        allowed = {
            "rope": ("pre", "post"), "heads": ("per_head", "joint"), "recent_of": ("ring", "prompt"),
            "decoded": ("coded", "exact"), "order": ("reduced", "reconstruct"),
        }
        for field, values in allowed.items():
            if getattr(self, field) not in values:
                raise ValueError(f"{field}={getattr(self, field)!r}: allowed are {', '.join(values)}")
        check_bits(self.bits, self.waters)
        for field in ("sinks", "recent"):
            if not isinstance(getattr(self, field), int) or getattr(self, field) < 0:
                raise ValueError(f"{field}={getattr(self, field)!r}: must be an int of at least 0")
        for field in ("rank", "rank_k", "rank_v"):
            value = getattr(self, field)
            if value is not None:
                check_rank(field, value)
        if self.energy is None and self.rank is None and (self.rank_k is None or self.rank_v is None):
            raise ValueError("rank=None: give rank, or rank_k and rank_v, or energy")
        if self.energy is not None:
            if not self.calibrated:
                raise ValueError(f"energy={self.energy!r}: only methods with calibrated bases choose ranks by energy")
            rank_for_energy(np.ones(1), self.energy)

    @abc.abstractmethod
    def basis_heads(self, spec: AttentionSpec) -> int:
        """J, the number of bases of a layer."""

    def width(self, spec: AttentionSpec) -> int:
        """W, the channels that a basis reads."""
        return spec.kv_heads // self.basis_heads(spec) * spec.head_dim

    def ranks(self, spec: AttentionSpec) -> tuple[int, int]:
        """Ranks of keys and values that the fields ask for."""
        fields = (("rank_k", self.rank_k), ("rank_v", self.rank_v))
        named = [("rank", self.rank) if value is None else (field, value) for field, value in fields]
        k, v = (resolve_rank(field, value, self.width(spec)) for field, value in named if value is not None)
        return k, v

    def rank_key(self, spec: AttentionSpec) -> dict[str, Any]:
        """What of `fit_key` says which ranks there are, and which bits where components have their own."""
        by_component = {} if mean_bits(self.bits) is None else {"bits": mean_bits(self.bits)}
        ranks = {"energy": self.energy} if self.energy else dict(zip(("rank_k", "rank_v"), self.ranks(spec), strict=True))
        return ranks | by_component

    def check_model(self, spec: AttentionSpec) -> None:
        """What `validate` asks of a model for all of these fields. Raises ValueError."""
        if self.energy is None:
            self.ranks(spec)

    def sides(self, tokens: Tokens | Taps) -> tuple[jax.Array, jax.Array]:
        """Keys as they are coded, and values `[B, T, K, D]`."""
        return tokens.k_pre if self.rope == "pre" else tokens.k, tokens.v
