"""What a group of layers holds, and what the parts of a method know of it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from lowrank_kv_jax.segments import exact as exact_tokens
from lowrank_kv_jax.storage.state import leaf, state, static
from lowrank_kv_jax.summaries import moments as moment_summary

Look = tuple[Any, tuple[jax.ShapeDtypeStruct, ...]]


@state
class GroupState:
    """The cache of a group of G layers.

    Attributes:
        ends: of each layer, its exact tokens.
        store: the tokens between them, as the codec stores them; None where nothing is.
        near_votes: scores of the exact tokens `[B, K, E]`, float32, summed over the layers.
        far_votes: scores of the stored tokens `[B, J, S]`, float32.
        gone: of each layer, moments of what is no longer there; none without a summary.
        marks: of each layer, what its pages are known by; none where everything is read.
    """

    ends: tuple[exact_tokens.Exact, ...]
    store: Any
    near_votes: jax.Array | None = leaf("batch", "kv_heads", "end_tokens", kind="indices")
    far_votes: jax.Array | None = leaf("batch", "kv_heads", "tokens", kind="indices")
    gone: tuple[moment_summary.EvictedMoments, ...]
    marks: tuple[Any, ...] = ()

    def of_layer(self, index: int) -> "GroupState":
        """What one layer reads and appends to: of all that there is for each layer, its own."""
        own = slice(index, index + 1)
        return dataclasses.replace(self, ends=self.ends[own], gone=self.gone[own], marks=self.marks[own])

    def with_layer(self, index: int, own: "GroupState") -> "GroupState":
        """This state, after what `of_layer` gave has become `own`."""
        ends, gone, marks = (
            (*before[:index], *now, *before[index + 1 :])
            for before, now in ((self.ends, own.ends), (self.gone, own.gone), (self.marks, own.marks))
        )
        return dataclasses.replace(own, ends=ends, gone=gone, marks=marks)

    @property
    def store_page(self) -> int | None:
        """Tokens of a page where steps read a few pages of the store; None where they read all of it."""
        if not self.marks:
            return None
        return self.store.tokens.k.shape[2] // jax.tree.leaves(self.marks)[0].shape[2]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class LayerGroup:
    """What a codec that works across layers is told of one of its groups, in the place of calibrated bases; no array.

    Attributes:
        layers: number of layers; the last group of a model may have fewer.
        ranks: of its bases, where the fields of the codec settle them.
    """

    layers: int
    ranks: Any = None


@state
class GroupBases:
    """What the parts know of a group of layers.

    Attributes:
        codec: of the codec.
        selection: of the selection, layer by layer.
        calibrated: whether the selection's were fitted.
        dense: whether the group's layers read everything, whatever the reading.
        looks: what `codec` looks like (`look_of`) in every group of the model, where a budget of bytes is shared by all.
    """

    codec: Any
    selection: tuple[Any, ...]
    calibrated: bool = static(default=False)
    dense: bool = static(default=False)
    looks: tuple[Look, ...] = static(default=())


def look_of(bases: Any) -> Look:
    """Structure, shapes and dtypes of bases, hashable by value."""
    leaves, structure = jax.tree.flatten(bases)
    return structure, tuple(jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in leaves)
