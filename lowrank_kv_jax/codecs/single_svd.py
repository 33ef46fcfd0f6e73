"""The principal subspace of the prompt itself: per-layer SVD at prefill."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from lowrank_kv_jax.codecs.lowrank import Bases, LowRank
from lowrank_kv_jax.estimators.svd import principal_subspace, second_moment
from lowrank_kv_jax.method import register


@register("single-svd")
@dataclasses.dataclass(frozen=True)
class SingleSVD(LowRank):
    """SVD of each prompt, layer by layer (the Single SVD baseline of xKV; the oracle for online rules).

    The right singular vectors are taken from the second moment of the tokens that will be coded. As in xKV what is
    decoded stays exact; unlike there, so do the sinks and the prompt's last tokens (`single-svd:paper` keeps none).
    """

    rank: int | float | None = 0.25
    rope: str = "pre"
    heads: str = "joint"
    decoded: str = "exact"

    adapts: ClassVar[bool] = True
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": {"sinks": 0, "recent": 0}}

    def prompt_bases(self, layout, bases, store, taps, lengths, weight):
        spec, ranks = layout.spec, self.ranks(layout.spec)
        out = []
        for x, rank in zip((taps.k_pre if self.rope == "pre" else taps.k, taps.v), ranks, strict=True):
            x = x.reshape(*x.shape[:2], self.basis_heads(spec), -1)
            out.append(principal_subspace(second_moment(x, weight), rank))
        return Bases(*out)
