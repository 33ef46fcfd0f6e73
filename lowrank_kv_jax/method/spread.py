"""A cache whose stored tokens are cut over devices (`storage.over_tokens`): what reads them there, who cannot be cut."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from lowrank_kv_jax.attention.partial import AttnPartial, merge, merge_over
from lowrank_kv_jax.method.layout import Layout, Place
from lowrank_kv_jax.pallas_kernels.coefficient_attention import attend_to
from lowrank_kv_jax.storage.cached_tokens import Beside
from lowrank_kv_jax.storage.over_tokens import TOKENS, on_each, own_segments, token_devices


def attend_store(
    codec: Any, layout: Layout, bases: Any, store: Any, q: jax.Array, positions: jax.Array, place: Place,
    beside: Beside,
) -> AttnPartial:
    """`codec.attend`: on each device over its own slots, partials merged by log-sum-exp."""
    if token_devices() == 1:
        return codec.attend(layout, bases, store, q, positions, place, beside)

    def attend(number: jax.Array, own: Any, bases: Any, q: jax.Array, positions: jax.Array) -> AttnPartial:
        return merge_over(codec.attend(layout, bases, own_segments(number, own), q, positions, place), TOKENS)

    return merge([attend_to(beside, **layout.spec.logits), on_each(attend, store, bases, q, positions)])


@dataclasses.dataclass(frozen=True)
class Whole:
    """What cannot be cut over devices, why, and whether a method has it."""

    what: str
    why: str
    holds: Callable[[Any], bool]


WHOLE: tuple[Whole, ...] = (
    Whole(
        "a reading", "the pages that a step needs may all lie on one device",
        lambda m: m.standing_reading is not None,
    ),
    Whole(
        "decoding=evict",
        "all stored tokens would be gathered and laid anew at every refresh; give decoding=keep or code",
        lambda m: m.votes,
    ),
    Whole(
        "decoding=code of heads that share a layer's budget",
        "they lie behind each other, and would be gathered and laid anew at every refresh; give decoding=keep",
        lambda m: m.selection is not None and m.selection.decoding == "code" and m.selection.adaptive,
    ),
    Whole(
        "positions=cache", "stored keys are turned by how many tokens of all devices lie before them",
        lambda m: m.selection is not None and m.selection.positions == "cache" and not m.selection.keeps_none,
    ),
    Whole(
        "its tokens", "layers that it does not compress keep them in the exact ends, of which every device has all",
        lambda m: not m.codec.spreads,
    ),
)
"""The one table of methods that a mesh with the axis "tokens" refuses."""


def check_spread(machine: Any, layout: Layout) -> None:
    """Raise ValueError for a method whose stored tokens cannot be cut over the layout's mesh."""
    refusal = why_whole(machine)
    if layout.token_devices > 1 and refusal is not None:
        raise ValueError(f"{machine.name}: {refusal.what} cannot be cut over the mesh axis "
                         f"tokens={layout.token_devices}: {refusal.why}")


def why_whole(machine: Any) -> Whole | None:
    """Why the stored tokens of a method cannot be cut; None: they can."""
    return next((one for one in WHOLE if one.holds(machine)), None)
