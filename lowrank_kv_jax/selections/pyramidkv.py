"""PyramidKV: SnapKV with budgets that shrink with depth."""

import dataclasses

from lowrank_kv_jax.method import register
from lowrank_kv_jax.selections.snapkv import Windowing
from lowrank_kv_jax.storage.state import state, static


@state
class Depth:
    """Which of how many layers a group is: without arrays, so that `init` has its shape."""

    layer: int = static()
    layers: int = static()


@register("pyramidkv")
@dataclasses.dataclass(frozen=True)
class PyramidKV(Windowing):
    """Lower layers keep more (Cai et al., 2024); budgets are averages over the layers.

    Attributes:
        beta: the top layer keeps a beta-th of the average.
        allocation: "official", as in KVCache-Factory, whose steps from layer to layer are whole tokens, rounded down:
            deep models with small budgets keep more than the budget, 10% of 68 tokens in 30 layers, and where a step is
            less than a token, twice as much in every layer; or "kvpress", in fractions, which counts the window into the
            pyramid.
    """

    beta: int = 20
    allocation: str = "official"

    def __post_init__(self):
        super().__post_init__()
        if not isinstance(self.beta, int) or self.beta < 1:
            raise ValueError(f"beta={self.beta!r}: must be an int of at least 1")
        if self.allocation not in ("official", "kvpress"):
            raise ValueError(f"allocation={self.allocation!r}: allowed are official, kvpress")

    @property
    def layered(self):
        return True

    def default_bases(self, spec):
        return tuple(Depth(layer, spec.num_layers) for layer in range(spec.num_layers))

    def of_layer(self, tokens, room, bases):
        if self.allocation == "kvpress":
            ends = self.sinks + (self.recent or 0)
            return kvpress_layer_budget(
                tokens + ends, room + ends, self.voters, bases.layer, bases.layers, self.beta) - ends
        return layer_budget(tokens, room, bases.layer, bases.layers, self.beta)


def layer_budget(budget: int, length: int, layer: int, layers: int, beta: int = 20) -> int:
    """Tokens that a layer keeps beside its window.

    Args:
        budget: tokens a layer keeps on average, B, or more: steps are rounded down.
        length: most tokens that a layer can keep.
        layer, layers: index and number of layers.
        beta: the top layer keeps B // beta, and what the steps leave over.
    """
    least = budget // beta
    most = 2 * budget - least
    if most >= length:
        most, least = length, 2 * budget - length
    return most - layer * ((most - least) // max(layers - 1, 1))


def kvpress_layer_budget(budget: int, length: int, window: int, layer: int, layers: int, beta: int = 20) -> int:
    """Tokens that a layer keeps, its window included, as kvpress divides them: in fractions, flat where it is too flat.

    Args:
        budget: tokens that a layer keeps on average, the window included.
        length: of the prompt.
        window: of the observation.
    """
    least = budget / beta
    most = 2 * budget - least
    if most >= length - window:
        most, least = length - window, 2 * budget - (length - window)
    if not length >= most >= least >= window:
        return max(1, budget)
    return round(most - layer * (most - least) / max(layers - 1, 1))
