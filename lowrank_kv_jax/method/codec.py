"""The contract of a codec: how the tokens between the exact ends are stored, and read."""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Float32, Int, Int32

from lowrank_kv_jax.attention.partial import AttnPartial, merge
from lowrank_kv_jax.attention.spec import AttentionSpec, Taps
from lowrank_kv_jax.method.layout import Layout, Place
from lowrank_kv_jax.method.part import Part
from lowrank_kv_jax.method.reading import Reading
from lowrank_kv_jax.pallas_kernels.coefficient_attention import attend_to
from lowrank_kv_jax.segments import coded as coded_tokens
from lowrank_kv_jax.storage.cached_tokens import Beside
from lowrank_kv_jax.storage.positions import PerHead, Runs
from lowrank_kv_jax.storage.quantised import read_tokens


@dataclasses.dataclass(frozen=True)
class Ends:
    """The exact tokens of a cache.

    Attributes:
        sinks: first tokens that stay for good.
        recent: last tokens; of the prompt (`pinned`), or at any time.
        pinned: the prompt's last `recent` tokens stay for good, and what is appended leaves at the next refresh.
        flushes: whether appended tokens ever leave.
        unit: they leave in whole groups of so many.
        wait: they leave once so many have gathered; 0 at every refresh.
        ahead: tokens behind those that leave that the codec wants to see too.
        asked: sinks and recent tokens that stay exact behind a selection too, whatever that keeps itself.
        bits: 8, what the exact tokens are held in where appended ones leave; None: the cache's dtype.
    """

    sinks: int
    recent: int
    pinned: bool = False
    flushes: bool = True
    unit: int = 1
    wait: int = 0
    ahead: int = 0
    asked: tuple[int, int] = (0, 0)
    bits: int | None = None

    def everything(self, layout: Layout) -> bool:
        """Whether nothing ever comes to lie between the ends."""
        return not self.flushes and self.sinks >= layout.capacity

    @property
    def first(self) -> int:
        """Slots at the front that never leave."""
        return self.sinks + (self.recent if self.pinned or not self.flushes else 0)

    @property
    def stay(self) -> int:
        """Tokens behind the first that stay at a refresh."""
        return 0 if self.pinned else self.recent

    def most(self, layout: Layout) -> int:
        """Most tokens that leave at once."""
        return (self.unit - 1 + self.wait + layout.block) // self.unit * self.unit

    def slots(self, layout: Layout) -> int:
        """Slots of an exact segment."""
        if self.flushes:
            return self.sinks + self.recent + self.unit - 1 + self.wait + layout.block
        return max(layout.capacity - max(layout.prompt - self.sinks - self.recent, 0), layout.block)

    def coded(self, layout: Layout) -> int:
        """Tokens that may come to lie between the ends."""
        if self.flushes:
            return max(layout.capacity - self.sinks - self.recent, self.most(layout))
        return max(layout.prompt - self.sinks - self.recent, 1)


class Tokens(NamedTuple):
    """Tokens of one layer.

    Attributes:
        k: keys after RoPE `[B, T, K, D]`.
        k_pre: keys before RoPE.
        v: values.
        positions: int32 `[B, T]`.
    """

    k: jax.Array
    k_pre: jax.Array
    v: jax.Array
    positions: jax.Array


class Logits(NamedTuple):
    """Queries and stored keys whose products are the logits: q `[B, T, N, R]`, keys `[B, J, S, R]`."""

    q: jax.Array
    keys: jax.Array


@dataclasses.dataclass(frozen=True)
class Codec(Part):
    """Abstract. How tokens are stored: a transform and a storage, with bases that may move.

    `bases` is what `fit` or `default_bases` gave for the group, `store` the codec's own state of it; a group is a tuple
    of layers, of one for most codecs. Stores declare their leaves (`state.leaf`).
    """

    stage: ClassVar[str | None] = "codec"

    per_token: ClassVar[bool] = True
    """Whether each token is coded on its own, so that a selection may stand before it; then a `TokenCodec`."""

    spreads: ClassVar[bool] = True
    """Whether the slots of its store may be cut over devices; see `method.spread`."""

    layers_alike: ClassVar[bool] = False
    """Whether one program may serve all layers of a group: `attend` and `logits` take a `Place.index` that is traced.
    Of latents none does, since each layer has rotary keys of its own."""

    implied: ClassVar[bool] = False
    """Whether a composition without a codec means this one."""

    reading: ClassVar[Reading | None] = None
    """The reading that belongs to the codec itself."""

    counted: ClassVar[Mapping[str, Callable[[Any], jax.Array]]] = {}
    """Numbers of a store that are worth showing, by name: functions from it to int32 `[B]`."""

    @abc.abstractmethod
    def ends(self, layout: Layout, bases: Any) -> Ends:
        """Exact tokens of a cache of this codec alone, and those that it asks of a selection."""

    def apart(self, store: Any) -> Int32[jax.Array, "B U O"] | None:
        """Numbers of the pages that `attend` reads by itself where only some pages of the store are read, int32.

        No step chooses them. Each of the U units has as many of them, and all of their slots hold a token; the number of
        all pages stands for those that are missing.
        """
        del store
        return None

    def settled(self, layout: Layout, bases: Any, weigh: Callable[[Layout, Any], Any]) -> Any:
        """The bases with everything settled that follows from a wanted size.

        Args:
            weigh: from a layout and such bases to the shapes of the whole group's state.
        """
        del layout, weigh
        return bases

    @abc.abstractmethod
    def empty(self, layout: Layout, bases: Any, size: int, positions: PerHead | None = None) -> Any:
        """An empty store with room for `size` tokens, of each unit or packed, or None.

        Args:
            positions: of tokens that are selected, packed where they have an owner; by default those of a run. Storage
                that rounds `size` up to whole tiles pads them.
        """

    def learn(
        self, layout: Layout, bases: Any, store: Any, taps: tuple[Taps, ...], lengths: Int[jax.Array, " B"],
        weight: Float32[jax.Array, "B T"],
    ) -> Any:
        """Move an empty store's bases towards a prompt. Default: they do not move.

        Args:
            taps: of each layer, T = layout.prompt, or fewer: the first chunk of a prompt.
            lengths: int32 `[B]`.
            weight: float32 `[B, T]`, 1 for the tokens that will be coded.
        """
        del layout, bases, taps, lengths, weight
        return store

    @abc.abstractmethod
    def take_in(
        self, layout: Layout, bases: Any, store: Any, tokens: tuple[Tokens, ...], counts: Int[jax.Array, " B"],
        seen: Int[jax.Array, " B"], positions: Runs | None = None, of_prompt: bool = False,
    ) -> Any:
        """Code a prompt's tokens, or those that leave the exact ends, behind what is stored; bases may move before.

        Args:
            tokens: of each layer `[B, T, ...]`.
            counts: int32 `[B]`, how many of the first to code.
            seen: int32 `[B]`, how many of the T there are, those ahead included.
            positions: of the store's slots, with a prompt's tokens alone, or those of its first chunk.
            of_prompt: whether they are of a further chunk of the prompt.
        """

    @abc.abstractmethod
    def attend(
        self, layout: Layout, bases: Any, store: Any, q: Float[jax.Array, "B T N D"],
        positions: Int[jax.Array, "B T"], place: Place, beside: Beside | None = None,
    ) -> AttnPartial:
        """Attention of one layer's queries over its stored tokens, all of which lie before every query.

        Args:
            beside: other tokens to attend to, for kernels that can read these, too; otherwise see `with_others`.
        """

    def fault(self, stores: tuple[Any, ...]) -> str | None:
        """As `KVMethod.fault`, of the stores of all groups."""
        del stores
        return None


def with_others(spec: AttentionSpec, part: AttnPartial, beside: Beside | None) -> AttnPartial:
    """A partial merged with that of other tokens, if there are any."""
    return part if beside is None else merge([attend_to(beside, **spec.logits), part], spec.kv_heads)


@dataclasses.dataclass(frozen=True)
class TokenCodec(Codec):
    """Abstract. A codec of one token at a time; its store has `tokens`, a segment with k, v, length and positions.

    The kv heads of a group's layers fall into U units that share a code: every head its own, groups of heads, or all.
    """

    lays_out: ClassVar[bool] = False
    """Whether it arranges the prompt's tokens by itself, so that none may be left out before."""

    @abc.abstractmethod
    def units(self, spec: AttentionSpec, bases: Any) -> int:
        """U; it divides the kv heads."""

    @abc.abstractmethod
    def encode(
        self, layout: Layout, bases: Any, store: Any, tokens: tuple[Tokens, ...]
    ) -> tuple[Float[jax.Array, "B U T Rk"], Float[jax.Array, "B U T Rv"]]:
        """Codes of keys and values `[B, U, T, R]`, before storage rounds them."""

    def adapt(
        self, layout: Layout, bases: Any, store: Any, tokens: tuple[Tokens, ...], weight: Float32[jax.Array, "B T"]
    ) -> Any:
        """Move the store's bases towards tokens that are about to be coded; `weight` `[B, T]` is 0 where there is none.

        What is stored already is transported. Default: bases do not move.
        """
        del layout, bases, tokens, weight
        return store

    def relearn(
        self, layout: Layout, bases: Any, store: Any, tokens: tuple[Tokens, ...], weight: Float32[jax.Array, "B T"]
    ) -> Any:
        """As `adapt`, towards a further chunk of the prompt. Default: what happens while decoding."""
        return self.adapt(layout, bases, store, tokens, weight)

    @abc.abstractmethod
    def decode(
        self, layout: Layout, bases: Any, store: Any, k: Float[jax.Array, "B J S Rk"], v: Float[jax.Array, "B J S Rv"],
        positions: PerHead, index: int | jax.Array,
    ) -> tuple[Float[jax.Array, "B _K S D"], Float[jax.Array, "B _K S D"]]:
        """Keys after RoPE and values `[B, K, S, D]` of one layer from codes `[B, J, S, R]`.

        Of packed codes (`positions.owner`), `[B, K, S, D]` or `[B, 1, S, D]`; slots of other heads hold anything.
        """

    @abc.abstractmethod
    def logits(
        self, layout: Layout, bases: Any, store: Any, q: Float[jax.Array, "B T N D"], place: Place
    ) -> Logits:
        """What the logits of one layer's queries over the stored tokens are products of, for votes."""

    def take_in(self, layout, bases, store, tokens, counts, seen, positions=None, of_prompt=False):
        del seen
        return take_tokens_in(self, layout, bases, store, tokens, counts, positions, of_prompt)


def take_tokens_in(
    codec: TokenCodec, layout, bases, store, tokens, counts, positions: Runs | None, of_prompt: bool
) -> Any:
    """`take_in` of a codec of one token at a time."""
    if positions is not None:
        if not tokens[0].k.shape[1]:
            return dataclasses.replace(store, tokens=dataclasses.replace(store.tokens, positions=positions))
        return hold(store, *codec.encode(layout, bases, store, tokens), counts, positions)
    weight = jnp.arange(tokens[0].k.shape[1])[None] < counts[:, None]
    move = codec.relearn if of_prompt else codec.adapt
    store = move(layout, bases, store, tokens, weight.astype(jnp.float32))
    codes = codec.encode(layout, bases, store, tokens)
    return dataclasses.replace(store, tokens=coded_tokens.append(store.tokens, *codes, counts))


def hold(store: Any, k: jax.Array, v: jax.Array, counts: jax.Array, positions: Runs | PerHead) -> Any:
    """The store with the first `counts[b]` of codes `[B, J, T, R]` in the place of its tokens."""
    return dataclasses.replace(store, tokens=coded_tokens.hold(store.tokens, k, v, counts, positions))


def codes_of(store: Any) -> tuple[jax.Array, jax.Array]:
    """Stored codes `[B, J, S, R]`: as they are, or widened where they are quantised."""
    def read(stored):
        return read_tokens(stored) if hasattr(stored, "read_block") else stored

    return read(store.tokens.k), read(store.tokens.v)
