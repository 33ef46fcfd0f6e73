"""KVzip: what a second reading of the prompt attends to stays."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from lowrank_kv_jax.method import register
from lowrank_kv_jax.method.head_budgets import ALLOCATIONS
from lowrank_kv_jax.selections.budgeted import DEFAULT_KEEP, Budgeted
from lowrank_kv_jax.selections.layer_shares import LayerShare, layer_shares


@register("kvzip")
@dataclasses.dataclass(frozen=True)
class KVzip(Budgeted):
    """Scores by context reconstruction (Kim et al., 2025), which know nothing of the question to come.

    Prefill reads the prompt twice (see `selections.reread`), behind itself and without the paper's words that ask for a
    repetition, since a method sees no tokenizer; decoded tokens stay. The heads of a layer share its budget. The paper
    shares one budget among all layers too, whose shapes would then depend on the prompt; here a layer's share is what it
    gets of a calibration text, and of prompts it gets much the same.

    Attributes:
        allocation: "kvpress", the best tokens of all heads of a layer stay, or "uniform", as many of each head.
        layers: "calibrated", or "uniform": every layer has the same budget. Shares are fitted to `keep`, and to a quarter
            where the budget is given in tokens; bytes are only counted with uniform ones.
    """

    sinks: int = 4
    recent: int | None = 0
    decoding: str = "keep"
    allocation: str = "kvpress"
    layers: str = "calibrated"

    rereads: ClassVar[bool] = True
    without: ClassVar[Mapping[str, str]] = {"votes": "layers=uniform"}
    bases_type: ClassVar[type | None] = LayerShare

    def __post_init__(self):
        super().__post_init__()
        allowed = [name for name in ALLOCATIONS if name != "official"]
        if self.allocation not in allowed:
            raise ValueError(f"allocation={self.allocation!r}: allowed are {', '.join(allowed)}")
        if self.decoding == "evict":
            raise ValueError("decoding='evict': allowed are keep, code; what is decoded is not read a second time")
        if self.layers not in ("calibrated", "uniform"):
            raise ValueError(f"layers={self.layers!r}: allowed are calibrated, uniform")
        if self.layered and self.budget_bytes is not None:
            raise ValueError(f"budget_bytes={self.budget_bytes}: give layers=uniform, or a budget in tokens")

    @property
    def adaptive(self):
        return self.allocation != "uniform"

    @property
    def layered(self):
        return self.layers == "calibrated"

    @property
    def calibrated(self):
        return self.layered

    @property
    def reads(self):
        return frozenset({"votes"})

    def fit(self, spec, moments):
        if not self.layered:
            return self.default_bases(spec)
        if moments.votes is None:
            raise ValueError("kvzip: the moments hold no votes of a second reading; collect them with `moments_for`, or "
                             "give a Calibrator taps with `reread`")
        return layer_shares(moments.votes, DEFAULT_KEEP if self.keep is None else self.keep)

    def fit_key(self, spec):
        return {"method": self.name, "keep": DEFAULT_KEEP if self.keep is None else self.keep, "layers": self.layers}

    def check_bases(self, spec, bases):
        if not isinstance(bases, LayerShare):
            raise ValueError(f"bases: expected a LayerShare for each layer, got {type(bases).__name__}")

    def of_layer(self, tokens, room, bases):
        return int(tokens * bases.share) if self.layered and tokens < room else tokens

    def prompt_scores(self, layout, tap, lengths):
        if tap.reread is None:
            raise ValueError("kvzip: the taps hold no votes of a second reading; use `prefill`, or give Taps.reread "
                             "what `attend_twice` returns")
        return tap.reread
