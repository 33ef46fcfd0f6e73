"""Parts as one method."""

import dataclasses
from typing import Any

from lowrank_kv_jax.method import REGISTRY, KVMethod, Part
from lowrank_kv_jax.method.codec import Codec
from lowrank_kv_jax.method.machine import Machine
from lowrank_kv_jax.method.selection import Selection
from lowrank_kv_jax.summaries.component import Summary

VERBATIM = "full"  # the codec of a composition that names none


def machine_of(part: Part) -> KVMethod:
    """A codec or a selection alone as a method; a method is itself."""
    if isinstance(part, KVMethod):
        return part
    if part.stage == "codec":
        return Machine(part)  # type: ignore[arg-type]
    return Machine(REGISTRY[VERBATIM](), part)  # type: ignore[arg-type]


def compose(codec: Codec | None = None, selection: Selection | None = None, summary: Summary | None = None) -> Any:
    """One method from up to three parts.

    Args:
        codec: how tokens are stored; None stores them as they are.
        selection: which tokens stay; None keeps all.
        summary: what stands for the rest.

    Raises:
        ValueError: no selection for a summary, or parts that do not go together (see `IMPOSSIBLE`).
        TypeError: something that is not the part that its name says.
    """
    for stage, part in (("codec", codec), ("selection", selection), ("summary", summary)):
        if part is not None and getattr(part, "stage", None) != stage:
            raise TypeError(f"{stage}={part!r}: is no {stage}")
    if codec is not None and codec.implied and selection is not None:
        codec = None
    if selection is None:
        if summary is not None:
            raise ValueError(f"{'' if codec is None else codec.name + '+'}{summary.name}: nothing is evicted; add a "
                             "selection, e.g. snapkv:keep=0.5")
        if codec is None:
            raise ValueError("compose needs at least a codec or a selection")
        return codec
    if codec is None and summary is None:
        return selection
    method = Machine(REGISTRY[VERBATIM]() if codec is None else codec, selection, summary)  # type: ignore[arg-type]
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


def _rule(method: Machine) -> Selection:
    assert method.selection is not None
    return method.selection


IMPOSSIBLE = (
    Impossible(
        "the summary is given twice", "the selection keeps moments already",
        lambda m: m.summary is not None and _rule(m).summary() is not None,
    ),
    Impossible(
        "selection and summary differ in their order", "one reads the other's statistics: give both the same order",
        lambda m: m.summary is not None and _rule(m).statistics not in (None, m.summary.order),
    ),
    Impossible(
        "the codec would have nothing to store", "the selection keeps no token between the sinks and the recent ones",
        lambda m: _rule(m).keeps_none and not m.codec.implied,
    ),
    Impossible(
        "the codec does not store tokens one by one", "a token that leaves would change those that stay",
        lambda m: not m.codec.per_token,
    ),
    Impossible(
        "positions='cache' cannot be combined with this codec", "stored keys would be rebuilt at every step to be turned",
        lambda m: _rule(m).positions == "cache" and not m.codec.implied,
    ),
    Impossible(
        "schedule='paper' cannot be combined with this codec",
        "one eviction a token would code all others again; give schedule=block",
        lambda m: _rule(m).schedule == "paper" and not m.codec.implied,
    ),
    Impossible(
        "recompress and rebuild cannot be combined with a selection",
        "they lay the prompt's tokens out by themselves; a selection has decoding=evict",
        lambda m: m.codec.per_token and m.codec.lays_out,
    ),
)
"""The one table of refusals; a new entry needs a reason that no contract could lift."""
