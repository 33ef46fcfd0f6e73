"""What every part of a method is: a configuration that knows its name, suits a model and may be fitted to a text."""

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from lowrank_kv_jax.attention.spec import AttentionSpec
from lowrank_kv_jax.checks.bounds import MOST, check_kind, check_number, is_number, plain_fields
from lowrank_kv_jax.checks.shown import short
from lowrank_kv_jax.method.layout import DEFAULT_BLOCK

_MOST = {"budget_bytes": 2**62, **dict.fromkeys(("steps", "iterations", "iterations_dec"), 1000)}
"""Of fields that count something else; steps are unrolled in the program."""


@dataclasses.dataclass(frozen=True)
class Part(abc.ABC):
    """A codec, a selection, or a whole method; frozen dataclasses, hashable by value."""

    name: ClassVar[str]
    """The registered name, set by `register`."""

    stage: ClassVar[str | None] = None
    """What it is in a composition: "codec" or "selection"; None for a whole method."""

    calibrated: ClassVar[bool] = False
    """Whether `fit` must have been called: `bases` is then required."""

    reads: ClassVar[frozenset[str]] = frozenset({"moments"})
    """What `fit` reads of a calibration text, each at its price: "moments" (second moments of the taps), "fisher"
    (information of the projections, a backward pass), "votes" (of a second reading), "sensitivity" (of the loss to
    keys and values, a backward pass), "sampled" (moments of text that the model writes, which it decodes first),
    "across" (second moments of each of its layer groups together), "keys_by_values" (products of their keys and values)
    and "outputs" (errors of each layer's output, some dozen times the layer on two thousand tokens)."""

    without: ClassVar[Mapping[str, str]] = {}
    """For what `fit` reads and a decoder's taps alone do not show ("fisher", "votes", "sensitivity", "sampled",
    "outputs"), the setting that does without it."""

    latents: ClassVar[bool] = False
    """Whether it can hold the cache of latent attention (MLA), whose keys are their own values."""

    rebuilds: ClassVar[bool] = False
    """Whether it codes one layer's tokens in a basis, so that `rebuilt` gives back what attention sees of them."""

    projects: ClassVar[bool] = False
    """Whether it codes groups of heads as Palu's projections do."""

    rereads: ClassVar[bool] = False
    """Whether prefill reads the prompt a second time, for `Taps.reread`: about three times the work."""

    attends_codes: ClassVar[bool] = False
    """Whether a prompt attends to its own tokens as they are coded, layer after layer, and not to exact ones."""

    default_block: ClassVar[int] = DEFAULT_BLOCK
    """Tokens that may be appended between two refreshes where nobody says how many. They are held exactly: a codec whose
    caches are so small that they weigh much asks for fewer. In a composition the codec decides."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Named settings, say of a paper: field values that `name:preset` stands for."""

    one_of: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """Fields of which only one is given, or a group of them that go together; one at its default gives way."""

    exact_at: ClassVar[Mapping[str, Any] | None] = None
    """Field values at which it is exact attention, its exact ends so short that a hundred tokens are mostly its own; None
    where it never is. The contract (`lowrank_kv_jax.testing`) is asked there."""

    small: ClassVar[Mapping[str, Any]] = {}
    """Field values with which its defaults compress prompts of a hundred tokens; the contract is asked there, too."""

    bases_type: ClassVar[type | None] = None
    """The NamedTuple of arrays, or the `@state` class of numbers, that holds the bases of one group, where `fit` returns
    any; what is saved on disk."""

    def __post_init__(self):
        """Refuse values of other types than declared, numbers that overflow or run for ever, two fields of `one_of`."""
        kinds = plain_fields(type(self))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in kinds:
                check_kind(field.name, value, kinds[field.name])
            if is_number(value):
                check_number(field.name, value, most=_MOST.get(field.name, MOST))
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        values = {name: getattr(self, name) for name in defaults}
        check_one_of(self.one_of, {name: x for name, x in values.items() if x not in (None, defaults[name])})

    def layer_groups(self, spec: AttentionSpec) -> tuple[tuple[int, ...], ...]:
        """Layers that share one state, in order; one layer each unless a codec works across layers."""
        return tuple((layer,) for layer in range(spec.num_layers))

    def validate(self, spec: AttentionSpec) -> None:
        """Raise ValueError, naming field, value and what is allowed, where the configuration does not suit a model."""
        del spec

    def fit(self, spec: AttentionSpec, moments: Any) -> tuple[Any, ...]:
        """Bases of each group from calibration `Moments`; `default_bases` where none are needed."""
        del moments
        return self.default_bases(spec)

    def default_bases(self, spec: AttentionSpec) -> tuple[Any, ...]:
        """What stands for the bases of each group where none were calibrated.

        None, or a pytree without arrays that tells `init` what group it makes an empty state of.
        """
        return (None,) * len(self.layer_groups(spec))

    def check_bases(self, spec: AttentionSpec, bases: Any) -> None:
        """Raise ValueError where bases of a group that were handed in are not of this configuration. Default: nothing."""
        del spec, bases

    def fit_key(self, spec: AttentionSpec) -> dict[str, Any]:
        """What decides the outcome of `fit`, as values that JSON holds.

        Saved bases are read by every method whose key equals that of the method they were fitted for. By default the
        name and all fields; a part whose other fields do not touch `fit` leaves those out.
        """
        del spec
        return {"method": self.name, **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)}}


def block_of(method: Part, block: int | None) -> int:
    """Tokens that may be appended between two refreshes: `block`, or as many as the method asks for where it is None."""
    return method.default_block if block is None else block


def check_one_of(one_of: Sequence[Sequence[str]], given: Mapping[str, Any]) -> None:
    """Raise ValueError where of `Part.one_of` more than one is given."""
    found = [[name for name in own if name in given] for own in one_of]
    clash = [f"{own[0]}={short(given[own[0]])}" for own in found if own]
    if len(clash) > 1:
        raise ValueError(f"{', '.join(clash)}: give exactly one of them")
