"""The contract of a compressed-cache method, and what it may know of the cache it lives in."""

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp

from lowrank_kv_jax.partial import AttnPartial
from lowrank_kv_jax.spec import AttentionSpec, Taps


@dataclasses.dataclass(frozen=True)
class Layout:
    """Static shape of a cache, hashable by value.

    Attributes:
        spec: the model's attention.
        batch: B, rows.
        prompt: length that the prompts are padded to; 0 for a cache that is filled by appending.
        capacity: longest sequence in tokens, the padded prompt included.
        block: tokens that may be appended between two refreshes.
        dtype: name of the dtype of the cache's floating leaves.
        mesh: devices that the cache is laid out over, with the axes "data" and "model"; None for one device.
        tokens: how coded tokens lie in memory, "rows" or "lanes" (see `token_layout`).
    """

    spec: AttentionSpec
    batch: int
    prompt: int
    capacity: int
    block: int
    dtype: str
    mesh: jax.sharding.Mesh | None = None
    tokens: str = "rows"


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a layer stands: its index within its group, and its sliding window."""

    index: int = 0
    window: int | None = None


@dataclasses.dataclass(frozen=True)
class KVMethod(abc.ABC):
    """A compressed KV cache as pure functions; subclasses are frozen dataclasses, abstract or final.

    Three kinds of thing are kept apart: the method itself (static configuration, hashable by value), `bases`
    (read-only arrays from calibration) and `state` (donated, threaded through jit). All functions are traceable.
    """

    name: ClassVar[str]
    """The registered name, set by `register`."""

    calibrated: ClassVar[bool] = False
    """Whether `fit` must have been called: `bases` is then required."""

    stage: ClassVar[str | None] = None
    """What it is in a composition: "codec" or "selection"; None where it stands alone."""

    latents: ClassVar[bool] = False
    """Whether it can hold the cache of latent attention (MLA), whose keys are their own values."""

    rereads: ClassVar[bool] = False
    """Whether prefill reads the prompt a second time, for `Taps.reread`: about three times the work."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Named settings, say of a paper: field values that `name:preset` stands for."""

    bases_type: ClassVar[type | None] = None
    """The NamedTuple of arrays, or the `@state` class of numbers, that holds the bases of one group, where `fit` returns
    any; what is saved on disk."""

    def __post_init__(self):
        """Refuse numbers that overflow or run for ever."""
        for field in dataclasses.fields(self):
            value, most = getattr(self, field.name), _MOST.get(field.name, MOST)
            if isinstance(value, int) and abs(value) > most:
                raise ValueError(f"{field.name}={value}: must be at most {most}")
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{field.name}={value}: must be a finite number")

    def layer_groups(self, spec: AttentionSpec) -> tuple[tuple[int, ...], ...]:
        """Layers that share one state, in order; one layer each unless a method works across layers."""
        return tuple((layer,) for layer in range(spec.num_layers))

    def validate(self, spec: AttentionSpec) -> None:
        """Raise ValueError, naming field, value and what is allowed, where the configuration does not suit a model."""
        del spec

    @property
    def reads(self) -> frozenset[str]:
        """What `fit` reads of a calibration text, each at its price: "moments" (second moments of the taps), "fisher"
        (information of the projections, a backward pass) and "votes" (of a second reading)."""
        return frozenset({"moments"})

    def fit(self, spec: AttentionSpec, moments: Any) -> tuple[Any, ...]:
        """Bases of each group from calibration `Moments`; `default_bases` where a method needs none."""
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
        method's name and all of its fields; a method whose other fields do not touch `fit` leaves those out.
        """
        del spec
        return {"method": self.name, **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)}}

    @abc.abstractmethod
    def init(self, layout: Layout, bases: Any) -> Any:
        """An empty state of one group."""

    @abc.abstractmethod
    def compress(self, layout: Layout, bases: Any, state: Any, taps: tuple[Taps, ...], lengths: jax.Array) -> Any:
        """The state of an exactly prefilled prompt.

        Args:
            bases: of this group.
            state: empty.
            taps: of each layer of the group, T = layout.prompt, rows padded on the right.
            lengths: int32 `[B]`.
        """

    def limit(self, layout: Layout, lengths: jax.Array) -> jax.Array:
        """Tokens that each row may see in all, int32 `[B]`, where its prompt has `lengths` `[B]` of `layout.prompt`.

        By default the whole capacity, the slots that padding left free too. A method with slots that only tokens of the
        prompt can take, so that what a shorter row leaves free stays free, says less: see `segments.exact.tail_limit`.
        """
        return jnp.maximum(lengths, layout.capacity)  # no constant: on a mesh it lies where the lengths do

    @abc.abstractmethod
    def append(
        self, layout: Layout, bases: Any, state: Any, taps: Taps, counts: jax.Array, positions: jax.Array, place: Place
    ) -> Any:
        """Append the first `counts[b]` of T >= 1 new tokens of one layer, in O(T).

        At most `layout.block` tokens are appended between two calls of `refresh`.
        """

    @abc.abstractmethod
    def attend(
        self, layout: Layout, bases: Any, state: Any, q: jax.Array, positions: jax.Array, place: Place
    ) -> AttnPartial:
        """Attention of T >= 1 queries `[B, T, N, D]` (after RoPE, appended before) at `positions` `[B, T]`."""

    def observe(
        self, layout: Layout, bases: Any, state: Any, q: jax.Array, lse: jax.Array, positions: jax.Array, place: Place
    ) -> Any:
        """See the total `lse` `[B, T, N]` after the merge: probabilities are exp(s - lse). Default: nothing."""
        del layout, bases, q, lse, positions, place
        return state

    def refresh(self, layout: Layout, bases: Any, state: Any) -> Any:
        """Periodic work between blocks of steps: flushes, evictions, basis updates. Default: nothing."""
        del layout, bases
        return state

    def fault(self, groups: tuple[Any, ...]) -> str | None:
        """What went wrong inside of jit, where nothing can be raised; asked on the host between blocks of steps.

        Args:
            groups: the states of a cache.

        Returns:
            A message that names layer and row, or None. Default: None, without reading the states.
        """
        del groups
        return None


class Fault(ValueError):
    """A cache can no longer be trusted; generation stops. The message says where, when and why."""


REGISTRY: dict[str, type[KVMethod]] = {}


_Method = TypeVar("_Method", bound=KVMethod)


def register(name: str) -> Callable[[type[_Method]], type[_Method]]:
    """Class decorator: make a method known to the CLI, the evals and the contract tests under `name`."""

    def add(cls: type[_Method]) -> type[_Method]:
        if name in REGISTRY:
            raise ValueError(f"method name {name!r} is taken by {REGISTRY[name].__qualname__}")
        cls.name = name
        cls.__post_init__ = _bounded(cls.__post_init__)
        cls.__eq__, cls.__hash__ = _equal, _hash
        REGISTRY[name] = cls
        return cls

    return add


MOST = 2**28
"""Of a field that counts tokens, channels or the like: sums of several stay within 32 bits."""

_MOST = {"budget_bytes": 2**62, **dict.fromkeys(("steps", "iterations", "iterations_dec"), 1000)}
"""Of other fields; steps are unrolled in the program."""


def _bounded(own: Callable[[Any], None]) -> Callable[[Any], None]:
    """A class' own checks after those of its bounds, whether or not it calls those of its bases."""

    @functools.wraps(own)
    def __post_init__(self):
        KVMethod.__post_init__(self)
        own(self)

    return __post_init__


def _value(method: KVMethod) -> tuple[Any, ...]:
    """All that a method is. Types count: rank=1 is one column and rank=1.0 all of them, though 1 == 1.0."""
    values = (getattr(method, field.name) for field in dataclasses.fields(method))
    return type(method), *((type(value), value) for value in values)


def _equal(self: KVMethod, other: object) -> bool:
    return isinstance(other, KVMethod) and _value(self) == _value(other)


def _hash(self: KVMethod) -> int:
    return hash(_value(self))
