"""The principal subspace of the prompt itself: per-layer SVD at prefill."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from lowrank_kv_jax.estimators.svd import principal_subspace, second_moment
from lowrank_kv_jax.method import register
from lowrank_kv_jax.methods.lowrank import Bases, LowRank


@register("single-svd")
@dataclasses.dataclass(frozen=True)
class SingleSVD(LowRank):
    """SVD of each prompt, layer by layer (the Single SVD baseline of xKV; the oracle for online rules).

    The right singular vectors are taken from the second moment of the tokens that will be coded. xKV keeps no sinks
    or recent tokens apart (`sinks=0,recent=0`) and decoded tokens exact, which is the default here too.
    """

    rank: int | float | None = 0.25
    rope: str = "pre"
    heads: str = "joint"
    decoded: str = "exact"

    adapts: ClassVar[bool] = True

    def prompt_bases(self, layout, state, taps, lengths):
        spec, ranks = layout.spec, self.ranks(layout.spec)
        slots = jnp.arange(layout.prompt)[None]
        weight = (slots >= self.sinks) & (slots < lengths[:, None] - self.recent)
        out = []
        for x, rank in zip((taps.k_pre if self.rope == "pre" else taps.k, taps.v), ranks, strict=True):
            x = x.reshape(*x.shape[:2], self.basis_heads(spec), -1)
            out.append(principal_subspace(second_moment(x, weight.astype(jnp.float32)), rank))
        return Bases(*out)
