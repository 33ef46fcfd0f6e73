"""A compressed cache as pure functions: what a model needs of it."""

import abc
import dataclasses
from typing import Any

import jax
from jaxtyping import Float, Float32, Int

from lowrank_kv_jax.attention.partial import AttnPartial
from lowrank_kv_jax.attention.spec import Taps
from lowrank_kv_jax.method.layout import Layout, Place
from lowrank_kv_jax.method.part import Part


@dataclasses.dataclass(frozen=True)
class KVMethod(Part):
    """What `prefill`, `extend` and `refresh` call; `method.machine` implements it for every composition.

    Three kinds of thing are kept apart: the method itself (static configuration, hashable by value), `bases`
    (read-only arrays from calibration) and `state` (donated, threaded through jit). All functions are traceable.
    """

    @abc.abstractmethod
    def init(self, layout: Layout, bases: Any) -> Any:
        """An empty state of one group."""

    @abc.abstractmethod
    def compress(
        self, layout: Layout, bases: Any, state: Any, taps: tuple[Taps, ...], lengths: Int[jax.Array, " B"]
    ) -> Any:
        """The state of an exactly prefilled prompt.

        Args:
            bases: of this group.
            state: empty.
            taps: of each layer of the group, rows padded on the right; T = layout.prompt, or fewer, the prompt's first
                chunk.
            lengths: int32 `[B]`.
        """

    @abc.abstractmethod
    def limit(self, layout: Layout, lengths: Int[jax.Array, " B"]) -> Int[jax.Array, " B"]:
        """Tokens that each row may see in all, int32 `[B]`, where its prompt has `lengths` `[B]` of `layout.prompt`.

        The capacity, or less where there are slots that only tokens of a prompt can take.
        """

    @abc.abstractmethod
    def append_with_query(
        self, layout: Layout, bases: Any, state: Any, taps: Taps, counts: Int[jax.Array, " B"], place: Place
    ) -> tuple[Any, Float[jax.Array, "B T N D"]]:
        """Append the first `counts[b]` of T >= 1 new tokens of one layer, in O(T).

        At most `layout.block` tokens are appended between two calls of `refresh`.

        Returns:
            The state, and the queries to attend with: `taps.q`, as they come out beside the written tokens.
        """

    @abc.abstractmethod
    def attend(
        self, layout: Layout, bases: Any, state: Any, q: Float[jax.Array, "B T N D"],
        positions: Int[jax.Array, "B T"], place: Place,
    ) -> AttnPartial:
        """Attention of T >= 1 queries `[B, T, N, D]` (after RoPE, appended before) at `positions` `[B, T]`.

        Over what the cache holds: where a model has sink logits, the caller merges them behind it.
        """

    @abc.abstractmethod
    def observe(
        self, layout: Layout, bases: Any, state: Any, q: Float[jax.Array, "B T N D"], lse: Float32[jax.Array, "B T N"],
        positions: Int[jax.Array, "B T"], place: Place,
    ) -> Any:
        """See the total `lse` `[B, T, N]` after the merge: probabilities are exp(s - lse)."""

    @abc.abstractmethod
    def refresh(self, layout: Layout, bases: Any, state: Any) -> Any:
        """Periodic work between blocks of steps: flushes, evictions, basis updates."""

    @abc.abstractmethod
    def fault(self, groups: tuple[Any, ...]) -> str | None:
        """What went wrong inside of jit, where nothing can be raised; asked on the host between blocks of steps.

        Args:
            groups: the states of a cache.

        Returns:
            A message that names layer and row, or None.
        """


class Fault(ValueError):
    """A cache can no longer be trusted; generation stops. The message says where, when and why."""
