"""Compositions: a codec, a selection and a summary as one method."""

import dataclasses
from typing import Any

from lowrank_kv_jax.method import KVMethod
from lowrank_kv_jax.methods.lowrank import LowRank
from lowrank_kv_jax.methods.staged import Staged
from lowrank_kv_jax.methods.stages import BasisStage
from lowrank_kv_jax.summaries.component import Summary


@dataclasses.dataclass(frozen=True)
class Composed(Staged):
    """Made by `compose`, spelled `codec+selection+summary`.

    Sinks and recent tokens: the more of what a codec with bases and the selection ask for; else the selection's.

    Attributes:
        codec: a low-rank method, one that stores tokens in few bits (it has `as_codec`), or None.
        selection: a method that selects.
        summary: of what it evicts, or None.
    """

    codec: KVMethod | None = None
    selection: KVMethod | None = None
    summary: Summary | None = None

    @property
    def parts(self) -> tuple[Any, ...]:
        """The stages that are there, in the order they are spelled."""
        return tuple(part for part in (self.codec, self.selection, self.summary) if part is not None)

    @property
    def name(self) -> str:
        return "+".join(part.name for part in self.parts)

    @property
    def calibrated(self) -> bool:
        return self._fitted is not None and self._fitted.calibrated

    @property
    def _fitted(self) -> KVMethod | None:
        """The stage that bases belong to: budgets that differ by layer go with no codec that has some."""
        return self.selection if self.codec is None or hasattr(self.codec, "as_codec") else self.codec

    @property
    def rereads(self) -> bool:
        return self.selection is not None and self.selection.rereads

    @property
    def reads(self):
        return frozenset() if self._fitted is None else self._fitted.reads

    @property
    def bases_type(self):
        return None if self._fitted is None else self._fitted.bases_type

    def validate(self, spec):
        for part in (self.codec, self.selection):
            if part is not None:
                part.validate(spec)

    def fit(self, spec, moments):
        return self._fitted.fit(spec, moments)

    def fault(self, groups):
        return None if self.codec is None else self.codec.fault(tuple(group.held for group in groups))

    def check_bases(self, spec, bases):
        if self._fitted is not None:
            self._fitted.check_bases(spec, bases)

    def default_bases(self, spec):
        return self._fitted.default_bases(spec)

    def fit_key(self, spec):
        return self._fitted.fit_key(spec)

    # ---- stages -------------------------------------------------------------------------------------------------

    def selection_stage(self):
        return self.selection.as_selection()

    def ends(self, layout):
        rule = self.selection_stage()
        sinks, recent = rule.sinks, rule.recent_tokens(layout)
        if self.codec is None or hasattr(self.codec, "as_codec"):
            return sinks, recent
        return max(sinks, self.codec.sinks), max(recent, self.codec.recent)

    def codec_stage(self):
        if self.codec is None:
            return super().codec_stage()
        return self.codec.as_codec() if hasattr(self.codec, "as_codec") else BasisStage(self.codec)

    def summary_stage(self):
        return self.summary or self.selection_stage().summary_stage()


def compose(
    codec: KVMethod | None = None, selection: KVMethod | None = None, summary: Summary | None = None
) -> KVMethod:
    """One method from up to three stages.

    Args:
        codec: a low-rank or quantising method: how selected tokens are stored; None stores them as they are.
        selection: which tokens stay.
        summary: what stands for the rest.

    Raises:
        ValueError: no selection for a summary, or stages that do not go together.
        TypeError: something that is not the stage that its name says.
    """
    for stage, part in (("codec", codec), ("selection", selection), ("summary", summary)):
        if part is not None and getattr(part, "stage", None) != stage:
            raise TypeError(f"{stage}={part!r}: is no {stage}")
    if selection is None:
        if summary is not None:
            raise ValueError(f"{'' if codec is None else codec.name + '+'}{summary.name}: nothing is evicted; add a "
                             "selection, e.g. snapkv:keep=0.5")
        if codec is None:
            raise ValueError("compose needs at least a codec or a selection")
        return codec
    if codec is None and summary is None:
        return selection
    rule = selection.as_selection()
    if codec is not None and hasattr(codec, "compose_with"):  # its states are of groups of layers
        return codec.compose_with(selection, summary)
    if summary is not None and rule.summary_stage() is not None:
        raise ValueError(f"{selection.name}+{summary.name}: {selection.name} keeps moments already; the summary is "
                         "given twice")
    if summary is not None and rule.statistics not in (None, summary.order):
        raise ValueError(f"{selection.name}:order={rule.statistics} reads the statistics of {summary.name}:order="
                         f"{summary.order}: give both the same order")
    if codec is not None:
        _check_codec(codec, selection, rule)
    return Composed(codec, selection, summary)


def _check_codec(codec: KVMethod, selection: KVMethod, rule: Any) -> None:
    names = f"{codec.name}+{selection.name}"
    wrong = {
        "a selection that keeps nothing between sinks and recent tokens": rule.keeps_none,
        "positions='cache'": rule.positions == "cache",
        "schedule='paper'": rule.schedule == "paper",
    }
    if hasattr(codec, "as_codec"):  # without bases
        kind, wrong = "quantised storage", wrong | codec.not_with(rule)
    elif isinstance(codec, LowRank):
        kind = "a low-rank codec"
        wrong |= {
            "heads with budgets of their own": rule.adaptive,
            "budgets that differ by layer": rule.layered,
            f"decoded={codec.decoded!r}": codec.decoded == "exact" and rule.decoding == "evict",
            "recent_of='prompt'": codec.recent_of == "prompt",
            f"bits={codec.bits}": codec.bits is not None,
        }
    else:
        raise ValueError(f"{names}: {codec.name} does not store selected tokens")
    for what, there in wrong.items():
        if there:
            raise ValueError(f"{names}: {what} cannot be combined with {kind}")
