"""Ada-KV: SnapKV with budgets of heads that follow the attention."""

import dataclasses

from lowrank_kv_jax.method import register
from lowrank_kv_jax.method.head_budgets import ALLOCATIONS
from lowrank_kv_jax.selections.snapkv import Windowing


@dataclasses.dataclass(frozen=True)
class Adaptive(Windowing):
    """Abstract. Heads share a layer's budget; a head that keeps fewer tokens stores fewer.

    Attributes:
        allocation: "official", "kvpress" or "uniform", see `method.head_budgets`.
        alpha: share of the budget that every head is sure of.
    """

    allocation: str = "official"
    alpha: float = 0.2

    def __post_init__(self):
        super().__post_init__()
        if self.allocation not in ALLOCATIONS:
            raise ValueError(f"allocation={self.allocation!r}: allowed are {', '.join(ALLOCATIONS)}")
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha={self.alpha!r}: must lie in [0, 1]")

    @property
    def adaptive(self):
        return True


@register("adakv")
@dataclasses.dataclass(frozen=True)
class AdaKV(Adaptive):
    """Head budgets from the best tokens of all heads of a layer (Feng et al., 2024)."""
