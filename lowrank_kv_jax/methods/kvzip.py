"""KVzip: what a second reading of the prompt attends to stays."""

import dataclasses
from typing import ClassVar

from lowrank_kv_jax.method import register
from lowrank_kv_jax.methods.selecting import Selecting
from lowrank_kv_jax.selection.adakv import ALLOCATIONS


@register("kvzip")
@dataclasses.dataclass(frozen=True)
class KVzip(Selecting):
    """Scores by context reconstruction (Kim et al., 2025), which know nothing of the question to come.

    Prefill reads the prompt twice (see `selection.reread`), behind itself and without the paper's words that ask for a
    repetition, since a method sees no tokenizer; decoded tokens stay. The heads of a layer share its budget. The paper
    shares one budget among all layers too, whose shapes would then depend on the prompt; here every layer has the same.

    Attributes:
        allocation: "kvpress", the best tokens of all heads of a layer stay, or "uniform", as many of each head.
    """

    sinks: int = 4
    recent: int | None = 0
    decoding: str = "keep"
    allocation: str = "kvpress"

    rereads: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        allowed = [name for name in ALLOCATIONS if name != "official"]
        if self.allocation not in allowed:
            raise ValueError(f"allocation={self.allocation!r}: allowed are {', '.join(allowed)}")
        if self.decoding != "keep":
            raise ValueError(f"decoding={self.decoding!r}: must be 'keep'; what is decoded is not read a second time")

    @property
    def adaptive(self):
        return self.allocation != "uniform"

    def allocation_of(self, tokens, sinks, recent):
        return 0, 0.0, self.allocation

    def prompt_scores(self, layout, tap, lengths):
        if tap.reread is None:
            raise ValueError("kvzip: the taps hold no votes of a second reading; use prefill or prefill_many")
        return tap.reread
