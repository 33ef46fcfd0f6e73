"""Parts as one method."""

import dataclasses
from typing import Any

from lowrank_kv_jax.method import REGISTRY, Part
from lowrank_kv_jax.method.codec import Codec
from lowrank_kv_jax.method.machine import Machine
from lowrank_kv_jax.method.reading import Reading
from lowrank_kv_jax.method.selection import Selection
from lowrank_kv_jax.summaries.component import Summary

VERBATIM = "full"  # the codec of a composition that names none


def machine_of(part: Part) -> Machine:
    """A codec, a selection or a reading alone as a method; a method is itself."""
    if isinstance(part, Machine):
        return part
    if part.stage == "codec":
        return Machine(part)  # type: ignore[arg-type]
    if part.stage == "reading":
        return Machine(REGISTRY[VERBATIM](), reading=part)  # type: ignore[arg-type]
    return Machine(REGISTRY[VERBATIM](), part)  # type: ignore[arg-type]


def compose(
    codec: Codec | None = None, selection: Selection | None = None, summary: Summary | None = None,
    reading: Reading | None = None,
) -> Any:
    """One method from up to four parts.

    Args:
        codec: how tokens are stored; None stores them as they are.
        selection: which tokens stay; None keeps all.
        summary: what stands for the rest.
        reading: which of the stored tokens a step reads; None reads all.

    Raises:
        ValueError: no selection for a summary, or parts that do not go together (see `IMPOSSIBLE`).
        TypeError: something that is not the part that its name says.
    """
    stages = {"codec": codec, "selection": selection, "summary": summary, "reading": reading}
    for stage, part in stages.items():
        if part is not None and (isinstance(part, type) or getattr(part, "stage", None) != stage):
            raise TypeError(f"{stage}={part!r}: is no {stage}")
    if selection is None and summary is not None:
        raise ValueError(f"{'' if codec is None else codec.name + '+'}{summary.name}: nothing is evicted; add a "
                         "selection, e.g. snapkv:keep=0.5")
    if codec is not None and codec.implied and (selection is not None or reading is not None):
        codec = None
    given = [part for part in (codec, selection, summary, reading) if part is not None]
    if not given:
        raise ValueError("compose needs at least a codec, a selection or a reading")
    if len(given) == 1:
        return given[0]
    method = Machine(REGISTRY[VERBATIM]() if codec is None else codec, selection, summary, reading)  # type: ignore[arg-type]
    for impossible in IMPOSSIBLE:
        if impossible.holds(method):
            raise ValueError(f"{method.name}: {impossible.what}; {impossible.why}")
    return method


@dataclasses.dataclass(frozen=True)
class Impossible:
    """Parts that cannot be one method: what of them, why, and whether a composition has it."""

    what: str
    why: str
    holds: Any


IMPOSSIBLE = (
    Impossible(
        "the summary is given twice", "the selection keeps moments already",
        lambda m: m.summary and m.selection.summary is not None,
    ),
    Impossible(
        "selection and summary differ in their order", "one reads the other's statistics: give both the same order",
        lambda m: m.summary and m.selection.statistics and m.selection.statistics.order != m.summary.order,
    ),
    Impossible(
        "the codec would have nothing to store", "the selection keeps no token between the sinks and the recent ones",
        lambda m: m.selection and m.selection.keeps_none and not m.codec.implied,
    ),
    Impossible(
        "the codec does not store tokens one by one", "a token that leaves, or is not read, would change the others",
        lambda m: not m.codec.per_token,
    ),
    Impossible(
        "positions='cache' cannot be combined with this codec", "stored keys would be rebuilt at every step to be turned",
        lambda m: m.selection and m.selection.positions == "cache" and not m.codec.implied,
    ),
    Impossible(
        "schedule='paper' cannot be combined with this codec",
        "one eviction a token would code all others again; give schedule=block",
        lambda m: m.selection and m.selection.schedule == "paper" and not m.codec.implied,
    ),
    Impossible(
        "recompress cannot be combined with a selection",
        "tokens wait there until they are coded; a selection has decoding=evict",
        lambda m: m.selection and m.codec.per_token and m.codec.lays_out,
    ),
    Impossible(
        "a selection moves the tokens that pages are made of", "its budget, not its pages, is what a step then reads",
        lambda m: m.selection and m.standing_reading,
    ),
    Impossible(
        "the size is given twice", "smaller= and budget_bytes= both say how many bytes the cache takes",
        lambda m: m.selection and m.selection.budget_bytes is not None and getattr(m.codec, "smaller", None) is not None,
    ),
    Impossible(
        "the reading is given twice", "the codec reads some of its tokens already",
        lambda m: m.reading and m.codec.reading,
    ),
)
"""The one table of refusals; a new entry needs a reason that no contract could lift."""
