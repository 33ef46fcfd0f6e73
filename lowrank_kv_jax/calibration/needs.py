"""What methods read of calibration texts, and what of it a decoder's taps show."""

from lowrank_kv_jax.attention.spec import AttentionSpec
from lowrank_kv_jax.method import Part
from lowrank_kv_jax.methods.compose import machine_of
from lowrank_kv_jax.methods.group_bases import check_ropes

SHOWN = frozenset({"moments", "across", "keys_by_values", "votes"})
"""What sums of taps can give of `Part.reads`; votes where texts were read twice."""
COSTS = {
    "fisher": "gradients by the projections", "sensitivity": "gradients by keys and values",
    "sampled": "text that the model writes", "outputs": "errors of the layers' outputs",
}


def groups_read(spec: AttentionSpec, method: Part) -> list[tuple[int, ...]]:
    """Layers whose moments the method reads together."""
    return [group for group in method.layer_groups(spec) if len(group) > 1] if "across" in method.reads else []


def groups_read_by_values(spec: AttentionSpec, method: Part) -> list[tuple[int, ...]]:
    """Layers whose keys and values the method reads together."""
    return list(method.layer_groups(spec)) if "keys_by_values" in method.reads else []


def voting_parts(method: Part) -> list[Part]:
    """The parts of a method that are fitted to votes of a second reading."""
    return [part for part in machine_of(method).parts if getattr(part, "calibrated", False) and "votes" in part.reads]


def check_taps_suffice(spec: AttentionSpec, method: Part) -> None:
    """Raise ValueError where a method does not suit a decoder, or its `fit` reads more than sums of taps."""
    method.validate(spec)
    check_ropes(method, spec)
    for part in machine_of(method).parts:
        if getattr(part, "calibrated", False):
            more = sorted(part.reads - SHOWN)
            if more:
                instead = ",".join(part.without[name] for name in more if name in part.without)
                what = " and ".join(f"{name!r} ({COSTS[name]})" for name in more)
                raise ValueError(f"{part.name}: its bases read {what}, which taps do not show"
                                 + (f"; give {instead}" if instead else ""))
