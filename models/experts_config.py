"""Static description of a mixture of experts, whatever the family."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """Routed experts in the place of the gated MLP of some layers, hashable by value.

    Attributes:
        count: routed experts.
        per_token: how many a token is sent to.
        size: inner width of an expert.
        layers: which layers have them; the others have a plain MLP.
        shared: experts that see every token, one MLP of so many times `size`.
        normalised: the weights of a token's experts are divided by their sum.
        scale: factor on the weights.
        groups, groups_per_token: the experts of a token come from its best groups; 1 and 1 for all.
        biases: the router and the experts' maps have them.
        clamp: alpha and limit of experts (up + 1) * gate * sigmoid(alpha * gate), the gate cut off above the limit, up
            on both sides (gpt-oss); None for those with silu(gate) * up.

    Raises:
        ValueError: groups that do not divide the experts, more experts or groups for a token than there are.
    """

    count: int
    per_token: int
    size: int
    layers: tuple[int, ...]
    shared: int = 0
    normalised: bool = False
    scale: float = 1.0
    groups: int = 1
    groups_per_token: int = 1
    biases: bool = dataclasses.field(default=False, metadata={"later": True})
    clamp: tuple[float, float] | None = dataclasses.field(default=None, metadata={"later": True})

    def __post_init__(self):
        if self.count % self.groups:
            raise ValueError(f"expert_groups={self.groups}: must divide the {self.count} experts")
        if not 1 <= self.groups_per_token <= self.groups:
            raise ValueError(f"groups_per_token={self.groups_per_token}: must lie in 1..{self.groups}")
        reachable = self.count // self.groups * self.groups_per_token
        if not 1 <= self.per_token <= reachable:
            raise ValueError(f"experts_per_token={self.per_token}: must lie in 1..{reachable}, the experts of "
                             f"{self.groups_per_token} groups")
