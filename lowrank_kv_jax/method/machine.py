"""The machine: every cache is exact ends, a store between them, and a summary of what was dropped.

    sinks | tokens that a selection keeps, as a codec stores them | recent tokens, and those appended since the refresh
    exact |   one store for each group of layers                  | exact                ... and moments of the rest

It is the only implementation of `KVMethod`. The parts decide: a codec how tokens are stored, a selection which of them
stay, a summary what stands for those that go. Sinks and recent tokens are out of reach of all three.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lowrank_kv_jax.attention.partial import AttnPartial, merge
from lowrank_kv_jax.attention.rope import half_split_channels
from lowrank_kv_jax.attention.sink_logits import with_sink
from lowrank_kv_jax.attention.spec import Taps
from lowrank_kv_jax.attention.taps import half_split
from lowrank_kv_jax.method import chosen, chunk, in_order, pages, voting
from lowrank_kv_jax.method.budget import Room, selected_tokens, tokens_for_bytes
from lowrank_kv_jax.method.codec import Codec, Ends, Tokens
from lowrank_kv_jax.method.group import GroupBases, GroupState, look_of
from lowrank_kv_jax.method.kv_method import KVMethod
from lowrank_kv_jax.method.layout import Layout, Place, tail_limit
from lowrank_kv_jax.method.oversized import check_token_counts
from lowrank_kv_jax.method.reading import Reading
from lowrank_kv_jax.method.rotated import attend_by_index
from lowrank_kv_jax.method.selection import Selection
from lowrank_kv_jax.method.spread import attend_store, check_spread
from lowrank_kv_jax.method.stepwise import evict_one
from lowrank_kv_jax.segments import exact as exact_tokens
from lowrank_kv_jax.summaries import moments as moment_summary
from lowrank_kv_jax.summaries.component import Summary

Watch = Callable[[Layout, Any, GroupState, tuple[Taps, ...], jax.Array], None]
"""Traced with the prompt: layout, the codec's bases, the compressed state, the taps of each layer, lengths."""


@dataclasses.dataclass(frozen=True)
class Machine(KVMethod):
    """A composition; made by `compose`, spelled `codec+selection+summary`.

    Sinks and recent tokens are the selection's where there is one, and never fewer than the codec asks to keep exact.

    Attributes:
        codec: how tokens are stored.
        selection: which stay, or None: all.
        summary: of what it evicts, or None.
        reading: which of the stored tokens a step reads, or None: all, unless the codec has a reading of its own.
        watch: sees every prompt that was compressed; changes nothing.
    """

    codec: Codec
    selection: Selection | None = None
    summary: Summary | None = None
    reading: Reading | None = None
    watch: Watch | None = None

    # ---- a part like any other ----------------------------------------------------------------------------------

    @property
    def parts(self) -> tuple[Any, ...]:
        """The parts that are spelled, in order."""
        alone = self.selection is None and self.reading is None
        codec = None if self.codec.implied and not alone else self.codec
        return tuple(part for part in (codec, self.selection, self.summary, self.reading) if part is not None)

    @property
    def name(self) -> str:
        return "+".join(part.name for part in self.parts)

    @property
    def latents(self) -> bool:
        return self.codec.latents and self.selection is None and self.reading is None

    @property
    def _fitted(self) -> list[Any]:
        return [part for part in (self.codec, self.selection) if part is not None and part.calibrated]

    @property
    def calibrated(self) -> bool:
        return bool(self._fitted)

    @property
    def rereads(self) -> bool:
        return self.selection is not None and self.selection.rereads

    @property
    def attends_codes(self) -> bool:
        return self.codec.attends_codes

    @property
    def default_block(self) -> int:
        return self.codec.default_block

    @property
    def reads(self):
        return frozenset().union(*(part.reads for part in self._fitted))

    @property
    def bases_type(self):
        types = [part.bases_type for part in self._fitted or [self.codec]]
        return types[0] if len(types) == 1 else GroupBases

    def layer_groups(self, spec):
        return self.codec.layer_groups(spec)

    def validate(self, spec):
        for part in (self.codec, self.selection, self.reading):
            if part is not None:
                part.validate(spec)

    def fit(self, spec, moments):
        """Bases of the one part that is calibrated, or `GroupBases` of both."""
        if len(self._fitted) == 2:
            assert self.selection is not None
            shares = self.selection.fit(spec, moments)
            groups = zip(self.codec.layer_groups(spec), self.codec.fit(spec, moments), strict=True)
            return tuple(GroupBases(own, tuple(shares[i] for i in group), True) for group, own in groups)
        return self._fitted[0].fit(spec, moments) if self._fitted else self.default_bases(spec)

    def default_bases(self, spec):
        return self.group_bases(spec, None)

    def fit_key(self, spec):
        keys = [part.fit_key(spec) for part in self._fitted]
        if len(keys) == 2:
            return {"codec": keys[0], "selection": keys[1]}
        return keys[0] if keys else self.codec.fit_key(spec)

    def group_bases(self, spec, bases: Sequence[Any] | None) -> tuple[GroupBases, ...]:
        """What the functions below take of each group, from what `fit` returned or None.

        Raises:
            ValueError: their number is wrong, or they are not of this configuration.
        """
        groups, rule = self.layer_groups(spec), self.selection
        dense = 0 if self.standing_reading is None else self.standing_reading.dense_layers
        of_codec = self.codec.default_bases(spec)
        of_layers = (None,) * spec.num_layers if rule is None else rule.default_bases(spec)
        fitted = self._fitted
        if bases is not None and fitted:
            wanted = spec.num_layers if fitted == [rule] else len(groups)
            if len(bases) != wanted:
                raise ValueError(f"bases hold {len(bases)} groups, method {self.name!r} has {wanted} on this model")
            for i, own in enumerate(bases):
                if self.bases_type is not None and not isinstance(own, self.bases_type | None):
                    raise ValueError(f"bases[{i}] is a {type(own).__name__}: method {self.name!r} takes "
                                     f"{self.bases_type.__name__}, which `calibrate` and `load_bases` return")
            if len(fitted) == 2:
                of_codec = [own.codec for own in bases]
                of_layers = [share for own in bases for share in own.selection]
            elif fitted == [rule]:
                of_layers = bases
            else:
                of_codec = bases
            for part, own in ((self.codec, of_codec), (rule, of_layers)):
                if part in fitted:
                    for group in own:
                        part.check_bases(spec, group)
        looks = () if rule is None or rule.budget_bytes is None else tuple(map(look_of, of_codec))
        return tuple(
            GroupBases(own, tuple(of_layers[i] for i in group), rule in fitted, group[0] < dense, looks)
            for group, own in zip(groups, of_codec, strict=True)
        )

    def of_group(self, bases: Any) -> GroupBases:
        """One group's entry of what `fit` or `default_bases` returned, or of `group_bases`, as the latter gives it."""
        if isinstance(bases, GroupBases):
            return bases
        if self.selection is not None and (self._fitted == [self.selection] or not self.codec.calibrated):
            return GroupBases(None, (bases,), self.selection.calibrated)
        return GroupBases(bases, (None,) * getattr(bases, "layers", 1))

    # ---- shapes -------------------------------------------------------------------------------------------------

    def ends_of(self, layout: Layout, bases: GroupBases) -> Ends:
        """The exact ends of a group."""
        rule = self.selection
        if rule is None and self.reading is not None and self.codec.implied:
            return Ends(self.reading.sinks, self.reading.recent)
        if rule is None:
            return self.codec.ends(layout, bases.codec)
        asked = self.codec.ends(layout, bases.codec)
        (sinks, recent), flushes = asked.asked, rule.decoding != "keep"
        return Ends(max(rule.sinks, sinks), max(rule.recent_tokens(layout), recent), flushes=flushes, bits=asked.bits)

    @property
    def standing(self) -> Summary | None:
        """The summary, be it of the composition or of the selection."""
        return self.summary or (None if self.selection is None else self.selection.summary)

    @property
    def standing_reading(self) -> Reading | None:
        """The reading, be it of the composition or of the codec."""
        return self.reading or self.codec.reading

    def room(self, layout: Layout, bases: GroupBases) -> Room:
        """Selected tokens of a group, and how their buffers lie."""
        rule, ends = self.selection, self.ends_of(layout, bases)
        assert rule is not None
        if rule.keeps_none:
            tokens = 0
        elif rule.budget_bytes is None:
            tokens = max(rule.tokens(layout) - ends.sinks - ends.recent, 0)
        else:
            layers, every = rule.default_bases(layout.spec), self.layer_groups(layout.spec)
            groups, layouts = [[layers[i] for i in group] for group in every], [layout.of_group(group) for group in every]
            own = look_of(bases.codec)  # one that is solved for this prompt stands for all
            looks = bases.looks if own in bases.looks else (own,) * len(every)
            tokens = tokens_for_bytes(self, layouts, looks, ends, groups)
        return self.room_of(layout, bases, selected_tokens(rule, layout, ends, tokens, bases.selection))

    def room_of(self, layout: Layout, bases: GroupBases, tokens: int) -> Room:
        """The same for so many selected tokens."""
        heads, units = layout.spec.kv_heads, self.codec.units(layout.spec, bases.codec)
        assert self.selection is not None
        later = layout.capacity - layout.prompt if self.selection.decoding == "code" else 0
        if self.selection.adaptive and units == heads and tokens:
            # official allocations round: half a token a head
            return Room(True, 1, layout.whole_slots(heads * (tokens + later) + heads // 2), tokens)
        slots, unit = tokens + later, self.codec.ends(layout, bases.codec).unit
        if self.selection.decoding == "code":  # whole tiles, which tokens that are appended need
            slots = -(-slots // unit) * unit
        return Room(False, units, layout.whole_slots(slots, unit), tokens)

    # ---- init ---------------------------------------------------------------------------------------------------

    def init(self, layout, bases):
        check_token_counts(self.parts, layout)
        check_spread(self, layout)
        bases = self.of_group(bases)

        def weigh(shape: Layout, own: Any):
            shape = dataclasses.replace(shape, mesh=None)  # slots that devices round up to change no rank: one answer
            return jax.eval_shape(lambda: self.empty(shape, dataclasses.replace(bases, codec=own)))

        return self.empty(layout, dataclasses.replace(bases, codec=self.codec.settled(layout, bases.codec, weigh)))

    def empty(self, layout: Layout, bases: GroupBases, tokens: int | None = None) -> GroupState:
        """An empty state; `tokens`: selected ones, instead of as many as the selection asks for."""
        spec, rule, layers = layout.spec, self.selection, len(bases.selection)
        ends = self.ends_of(layout, bases)
        exact = exact_tokens.empty_exact(
            layout.batch, spec.kv_heads, ends.slots(layout), spec.head_dim, jnp.dtype(layout.dtype),
            gaps=(ends.sinks, ends.first), value_dim=0 if spec.latent else None, bits=ends.bits if ends.flushes else None,
        )
        if rule is None:
            if ends.everything(layout):
                return GroupState((exact,) * layers, None, None, None, ())
            size, marks, reading = layout.whole_slots(ends.coded(layout), ends.unit), (), self.standing_reading
            if reading is not None and not bases.dense:
                count = -(-size // reading.page)
                size, marks = count * reading.page, (reading.empty(layout, count),) * layers
            return GroupState((exact,) * layers, self.codec.empty(layout, bases.codec, size), None, None, (), marks)
        room = self.room(layout, bases) if tokens is None else self.room_of(layout, bases, tokens)
        store = None
        if room.slots:
            store = self.codec.empty(layout, bases.codec, room.slots, room.nowhere(layout))
        near = far = None
        if self.votes:
            near = jnp.zeros((layout.batch, spec.kv_heads, exact.k.shape[2]), jnp.float32)
            far = None if store is None else jnp.zeros(store.tokens.positions.position.shape, jnp.float32)
        # moments stand for nothing where a window slides: which of the dropped tokens have left it they do not know
        summed = self._moments and (layout.window is None or (rule is not None and rule.statistics))
        gone = (self._empty_moments(layout),) * layers if summed else ()
        return GroupState((exact,) * layers, store, near, far, gone)

    @property
    def sums_up(self) -> bool:
        """Whether moments of dropped tokens are kept, to stand for them or to choose by."""
        return self._moments is not None

    @property
    def _moments(self) -> Summary | None:
        """Those that are kept."""
        if self.standing is not None:
            return self.standing
        return None if self.selection is None else self.selection.statistics

    @property
    def votes(self) -> bool:
        """Whether decoded queries vote."""
        rule = self.selection
        return rule is not None and rule.decoding == "evict" and not rule.keeps_none

    def _empty_moments(self, layout: Layout) -> moment_summary.EvictedMoments:
        assert self._moments is not None
        spec, dtype = layout.spec, jnp.dtype(self._moments.dtype)
        return moment_summary.empty_moments(layout.batch, spec.kv_heads, spec.head_dim, self._moments.order, dtype)

    # ---- the prompt ---------------------------------------------------------------------------------------------

    def compress(self, layout, bases, state, taps, lengths):
        bases, taps = self.of_group(bases), tuple(half_split(layout.spec, own) for own in taps)
        if self.selection is None:
            state = in_order.compress(self, layout, bases, state, taps, lengths)
        else:
            state = chosen.compress(self, layout, bases, state, taps, lengths)
        if self.watch is not None:
            self.watch(layout, bases.codec, state, taps, lengths)
        return state

    def limit(self, layout, lengths):
        room = jnp.maximum(lengths, layout.capacity)  # no constant: on a mesh it lies where the lengths do
        for bases in set(self.codec.default_bases(layout.spec)):
            ends = self.ends_of(layout, self.of_group(bases))
            if not ends.flushes or (self.selection is not None and self.selection.decoding == "code"):
                room = jnp.minimum(room, tail_limit(layout, lengths, ends.sinks + ends.recent))
        return room

    # ---- a block of new tokens ----------------------------------------------------------------------------------

    def append(self, layout, bases, state, taps, counts, positions, place):
        """The state of `append_with_query` alone."""
        del positions
        return self.append_with_query(layout, bases, state, taps, counts, place)[0]

    def append_with_query(self, layout, bases, state, taps, counts, place):
        ends, own = list(state.ends), half_split(layout.spec, taps)
        ends[place.held], q = exact_tokens.append_with_query(ends[place.held], taps.q, own.k, own.v, counts)
        state = dataclasses.replace(state, ends=tuple(ends))
        if self.selection is not None and self.selection.schedule == "paper" and taps.k.shape[1] == 1:
            state = evict_one(self, layout, self.of_group(bases), state, own, counts)
        return state, q

    def attend(self, layout, bases, state, q, positions, place):
        q = half_split_channels(layout.spec.rope, q)
        return self._attend(layout, self.of_group(bases), state, q, positions, place)

    def _attend(self, layout, bases, state, q, positions, place, whole=False):
        part = self._retained(layout, bases, state, q, positions, place, whole)
        if self.standing is not None and place.window is None:  # moments do not know which left a sliding window
            moments = moment_summary.partial(state.gone[place.held], q, layout.spec.scale)
            part = merge([part, moments], layout.spec.kv_heads)
        return part

    def retained(self, layout, bases, state, q, positions, place):
        """Attention over the tokens that are still there."""
        q = half_split_channels(layout.spec.rope, q)
        return self._retained(layout, self.of_group(bases), state, q, positions, place)

    def _retained(self, layout, bases, state, q, positions, place, whole=False):
        rule, ends = self.selection, state.ends[place.held]
        window = place.window
        if rule is not None and rule.keeps_none and self.standing is None and not whole:
            window = min(self.ends_of(layout, bases).recent, window or layout.capacity)
        if rule is not None and (rule.positions == "cache" or window != place.window):
            return attend_by_index(self, layout, bases, state, q, positions, place, window)
        if state.store is None:
            return exact_tokens.attend(ends, q, positions, **layout.spec.logits, window=window)
        store = state.store if whole else pages.read(self, layout, state, q, positions, place)
        beside = exact_tokens.asked(ends, q, positions, window)
        return attend_store(self.codec, layout, bases.codec, store, q, positions, place, beside)

    def observe(self, layout, bases, state, q, lse, positions, place):
        if not self.votes:
            return state
        q = half_split_channels(layout.spec.rope, q)
        return voting.observe(self, layout, self.of_group(bases), state, q, lse, positions, place)

    # ---- a chunk of many tokens, of a prompt or of a turn -------------------------------------------------------

    def read_chunk(
        self, layout: Layout, bases: Any, state: GroupState, taps: Taps, positions: jax.Array, counts: jax.Array,
        place: Place,
    ) -> tuple[AttnPartial, voting.Seen | None]:
        """Attention of one layer's chunk to itself and to all that the cache holds, pages that no step would read too.

        Args:
            taps: of T tokens.
            positions: int32 `[B, T]`.
            counts: int32 `[B]`, how many of the T there are.

        Returns:
            The partial, a model's sink logits merged behind it, and the votes of the queries, if they have any.
        """
        past = self.past(layout, bases, state, taps.q, positions, place)
        bases, taps = self.of_group(bases), half_split(layout.spec, taps)
        total = with_sink(merge([past, chunk.attend(layout, taps, place.window)]), taps.sink_logits)
        if state.near_votes is None:
            return total, None
        rule = self.selection
        if rule is not None and not rule.by_votes:
            return total, voting.alone(state, rule.prompt_scores(layout, taps, counts))
        return total, voting.of_chunk(self, layout, bases, state, taps, total.lse, positions, counts, place)

    def past(self, layout, bases, state, q, positions, place):
        """Attention of a chunk's queries over all that the cache holds."""
        q = half_split_channels(layout.spec.rope, q)
        return self._attend(layout, self.of_group(bases), state, q, positions, place, whole=True)

    def ingest(self, layout, bases, state, taps, seen, positions, counts, *, of_prompt):
        """The state of a group with a chunk that `read_chunk` has read in each of its layers; see `method.chunk`."""
        taps = (half_split(layout.spec, own) for own in taps)
        tokens = tuple(Tokens(own.k, own.k_pre, own.v, positions) for own in taps)
        return chunk.ingest(self, layout, self.of_group(bases), state, tokens, seen, counts, of_prompt=of_prompt)

    # ---- between blocks -----------------------------------------------------------------------------------------

    def refresh(self, layout, bases, state):
        bases = self.of_group(bases)
        ends = self.ends_of(layout, bases)
        if not ends.flushes:
            return state
        if self.selection is not None:
            return chosen.refresh(self, layout, bases, state)
        if not ends.wait:
            return in_order.refresh(self, layout, bases, state)
        full = jnp.any(state.ends[0].length >= ends.sinks + ends.recent + ends.wait)
        return jax.lax.cond(full, lambda s: in_order.refresh(self, layout, bases, s), lambda s: s, state)

    # ---- faults -------------------------------------------------------------------------------------------------

    def fault(self, groups):
        return self.codec.fault(tuple(group.store for group in groups))
