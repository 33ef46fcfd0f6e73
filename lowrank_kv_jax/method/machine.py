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

from lowrank_kv_jax.attention.partial import merge
from lowrank_kv_jax.attention.rope import rope_angles, rotate
from lowrank_kv_jax.attention.spec import Taps
from lowrank_kv_jax.method import candidates as pool
from lowrank_kv_jax.method import pages, voting
from lowrank_kv_jax.method.budget import Room, selected_tokens, tokens_for_bytes
from lowrank_kv_jax.method.codec import Codec, Ends, Tokens, codes_of, hold
from lowrank_kv_jax.method.kv_method import KVMethod
from lowrank_kv_jax.method.layout import Layout, tail_limit
from lowrank_kv_jax.method.reading import Reading
from lowrank_kv_jax.method.rotated import attend_by_index
from lowrank_kv_jax.method.selection import Selection
from lowrank_kv_jax.method.stepwise import evict_one
from lowrank_kv_jax.segments import exact as exact_tokens
from lowrank_kv_jax.storage.cache_dtype import narrow
from lowrank_kv_jax.storage.positions import PerHead, Runs
from lowrank_kv_jax.storage.state import leaf, state, static
from lowrank_kv_jax.summaries import moments as moment_summary
from lowrank_kv_jax.summaries.component import Summary


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
    near_votes: jax.Array | None = leaf("batch", "kv_heads", "tokens", kind="indices")
    far_votes: jax.Array | None = leaf("batch", "kv_heads", "tokens", kind="indices")
    gone: tuple[moment_summary.MomentSums, ...]
    marks: tuple[Any, ...] = ()


@state
class GroupBases:
    """What the parts know of a group of layers.

    Attributes:
        codec: of the codec.
        selection: of the selection, layer by layer.
        calibrated: whether the selection's were fitted.
        dense: whether the group's layers read everything, whatever the reading.
    """

    codec: Any
    selection: tuple[Any, ...]
    calibrated: bool = static(default=False)
    dense: bool = static(default=False)


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
        groups, rule = self.layer_groups(spec), self.selection
        dense = 0 if self.standing_reading is None else self.standing_reading.dense_layers
        of_codec = self.codec.default_bases(spec)
        of_layers = (None,) * spec.num_layers if rule is None else rule.default_bases(spec)
        fitted = self._fitted
        if bases is not None and fitted:
            wanted = spec.num_layers if fitted == [rule] else len(groups)
            if len(bases) != wanted:
                raise ValueError(f"bases hold {len(bases)} groups, method {self.name!r} has {wanted} on this model")
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
        return tuple(
            GroupBases(own, tuple(of_layers[i] for i in group), rule in fitted, group[0] < dense)
            for group, own in zip(groups, of_codec, strict=True)
        )

    def of_group(self, bases: Any) -> GroupBases:
        """One group's entry of what `fit` or `default_bases` returned, or of `group_bases`, as the latter gives it."""
        if isinstance(bases, GroupBases):
            return bases
        if self.selection is not None and (self._fitted == [self.selection] or not self.codec.calibrated):
            return GroupBases(None, (bases,), self.selection.calibrated)
        return GroupBases(bases, (None,) * self.codec.group_size(bases))

    # ---- shapes -------------------------------------------------------------------------------------------------

    def ends_of(self, layout: Layout, bases: GroupBases) -> Ends:
        """The exact ends of a group."""
        rule = self.selection
        if rule is None and self.reading is not None and self.codec.implied:
            return Ends(self.reading.sinks, self.reading.recent)
        if rule is None:
            return self.codec.ends(layout, bases.codec)
        sinks, recent = self.codec.exact_ends()
        flushes = rule.decoding == "evict"
        return Ends(max(rule.sinks, sinks), max(rule.recent_tokens(layout), recent), flushes=flushes)

    @property
    def standing(self) -> Summary | None:
        """The summary, be it of the composition or of the selection."""
        return self.summary or (None if self.selection is None else self.selection.summary())

    @property
    def standing_reading(self) -> Reading | None:
        """The reading, be it of the composition or of the codec."""
        return self.reading or self.codec.reading()

    def room(self, layout: Layout, bases: GroupBases) -> Room:
        """Selected tokens of a group, and how their buffers lie."""
        rule, ends = self.selection, self.ends_of(layout, bases)
        assert rule is not None
        if rule.keeps_none:
            tokens = 0
        elif rule.budget_bytes is None:
            tokens = max(rule.tokens(layout) - ends.sinks - ends.recent, 0)
        else:
            layers = rule.default_bases(layout.spec)
            groups = [[layers[i] for i in group] for group in self.layer_groups(layout.spec)]
            tokens = tokens_for_bytes(rule, layout, ends, groups, lambda row, n: self.empty(row, bases, n))
        return self.room_of(layout, bases, selected_tokens(rule, layout, ends, tokens, bases.selection))

    def room_of(self, layout: Layout, bases: GroupBases, tokens: int) -> Room:
        """The same for so many selected tokens."""
        heads, units = layout.spec.kv_heads, self.codec.units(layout.spec, bases.codec)
        assert self.selection is not None
        if self.selection.adaptive and units == heads and tokens:
            return Room(True, 1, heads * tokens + heads // 2, tokens)  # official allocations round: half a token a head
        return Room(False, units, tokens, tokens)

    # ---- init ---------------------------------------------------------------------------------------------------

    def init(self, layout, bases):
        bases = self.of_group(bases)

        def weigh(shape: Layout, own: Any):
            return jax.eval_shape(lambda: self.empty(shape, dataclasses.replace(bases, codec=own)))

        return self.empty(layout, dataclasses.replace(bases, codec=self.codec.settled(layout, bases.codec, weigh)))

    def empty(self, layout: Layout, bases: GroupBases, tokens: int | None = None) -> GroupState:
        """An empty state; `tokens`: selected ones, instead of as many as the selection asks for."""
        spec, rule, layers = layout.spec, self.selection, len(bases.selection)
        ends = self.ends_of(layout, bases)
        exact = exact_tokens.empty_exact(
            layout.batch, spec.kv_heads, ends.slots(layout), spec.head_dim, jnp.dtype(layout.dtype),
            gaps=(ends.sinks, ends.first), value_dim=0 if spec.latent else None,
        )
        if rule is None:
            if ends.everything(layout):
                return GroupState((exact,) * layers, None, None, None, ())
            size, marks, reading = ends.coded(layout), (), self.standing_reading
            if reading is not None and not bases.dense:
                count = -(-size // reading.page)
                size, marks = count * reading.page, (reading.empty(layout, count),) * layers
            return GroupState((exact,) * layers, self.codec.empty(layout, bases.codec, size), None, None, (), marks)
        room = self.room(layout, bases) if tokens is None else self.room_of(layout, bases, tokens)
        store = None
        if room.tokens:
            store = self.codec.empty(layout, bases.codec, room.slots, room.nowhere(layout))
        near = far = None
        if rule.votes:
            near = jnp.zeros((layout.batch, spec.kv_heads, exact.k.shape[2]), jnp.float32)
            far = None if store is None else jnp.zeros(store.tokens.positions.position.shape, jnp.float32)
        gone = (self._empty_moments(layout),) * layers if self._order else ()
        return GroupState((exact,) * layers, store, near, far, gone)

    @property
    def _order(self) -> str | None:
        """Of the moments that are kept."""
        if self.standing is not None:
            return self.standing.order
        return None if self.selection is None else self.selection.statistics

    def _empty_moments(self, layout: Layout) -> moment_summary.MomentSums:
        assert self._order is not None
        dtype = jnp.dtype("float32" if self.standing is None else self.standing.dtype)
        return moment_summary.empty_moments(layout.batch, layout.spec.kv_heads, layout.spec.head_dim, self._order, dtype)

    # ---- the prompt ---------------------------------------------------------------------------------------------

    def compress(self, layout, bases, state, taps, lengths):
        bases = self.of_group(bases)
        if self.selection is None:
            state = self._compress_all(layout, bases, state, taps, lengths)
        else:
            self.selection.check_prompt(layout)
            state = self._compress_selected(layout, bases, state, taps, lengths)
        if self.watch is not None:
            self.watch(layout, bases.codec, state, taps, lengths)
        return state

    def _compress_all(self, layout, bases, state, taps, lengths):
        ends, codec = self.ends_of(layout, bases), self.codec
        counts = jnp.maximum(lengths - ends.sinks - ends.recent, 0) // ends.unit * ends.unit
        exact = tuple(
            exact_tokens.hold_prompt(part, tap.k, tap.v, lengths, ends.sinks, ends.recent + ends.unit - 1, counts)
            for part, tap in zip(state.ends, taps, strict=True)
        )
        if state.store is None:
            return dataclasses.replace(state, ends=exact)
        slots = jnp.arange(layout.prompt, dtype=jnp.int32)[None]
        weight = (slots >= ends.sinks) & (slots < ends.sinks + counts[:, None])
        store = codec.learn(layout, bases.codec, state.store, taps, lengths, weight.astype(jnp.float32))
        end = min(layout.prompt, max(layout.prompt - ends.recent, ends.sinks) + codec.ahead(layout))
        part = slice(ends.sinks, max(end, ends.sinks))
        tokens = tuple(Tokens(tap.k[:, part], tap.k_pre[:, part], tap.v[:, part], slots[:, part]) for tap in taps)
        zero = jnp.zeros_like(counts)
        after = zero + (ends.recent if ends.first > ends.sinks else 0)
        where = Runs(jnp.stack([zero, counts], axis=1), jnp.stack([zero + ends.sinks, after], axis=1))
        seen = jnp.clip(lengths - ends.sinks, 0, part.stop - part.start)
        store = codec.fill(layout, bases.codec, store, tokens, counts, seen, where)
        marks = self._marked(state.marks, tokens, zero, counts)
        return dataclasses.replace(state, ends=exact, store=store, marks=marks)

    def _marked(self, marks: tuple[Any, ...], tokens: Sequence[Tokens], start: jax.Array, counts: jax.Array):
        """Marks of each layer with tokens that come to be stored."""
        reading = self.standing_reading
        if reading is None or not tokens[0].k.shape[1]:
            return marks
        return tuple(reading.add(own, new.k, start, counts) for own, new in zip(marks, tokens, strict=False))

    def _compress_selected(self, layout, bases, state, taps, lengths):
        rule, ends = self.selection, self.ends_of(layout, bases)
        exact = tuple(
            exact_tokens.hold_prompt(part, tap.k, tap.v, lengths, ends.sinks, ends.recent)
            for part, tap in zip(state.ends, taps, strict=True)
        )
        state = dataclasses.replace(state, ends=exact)
        scores = [rule.prompt_scores(layout, tap, lengths) for tap in taps]
        votes = sum(scores[1:], scores[0])
        slots = jnp.arange(layout.prompt, dtype=jnp.int32)
        middle = (slots >= ends.sinks) & (slots < lengths[:, None] - ends.recent)
        if state.near_votes is not None:
            state = dataclasses.replace(state, near_votes=voting.of_prompt(state.near_votes, exact[0], votes))
        stays = jnp.zeros(votes.shape, bool)
        if state.store is not None:
            state, stays = self._select_prompt(layout, bases, state, taps, lengths, votes, middle)
        gone = tuple(
            moment_summary.update(sums, *_by_head(tap.k, tap.v), middle[:, None] & ~stays)
            for sums, tap in zip(state.gone, taps, strict=False)
        )
        return dataclasses.replace(state, gone=gone)

    def _select_prompt(self, layout, bases, state, taps, lengths, votes, middle):
        """The state with the prompt's selected tokens coded, and which of them each head keeps, bool `[B, K, S]`."""
        room, heads, codec = self.room(layout, bases), layout.spec.kv_heads, self.codec
        size = layout.prompt
        position = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), votes.shape)
        found = pool.arrange(room, position, votes, jnp.broadcast_to(middle[:, None], votes.shape))
        score = found.votes
        if self.selection.statistics:
            exact = [tuple(narrow(x, layout.dtype) for x in _by_head(tap.k, tap.v)) for tap in taps]
            sums = state.gone
            if self.selection.prefill == "informed":
                weight = jnp.broadcast_to(middle[:, None], votes.shape)
                sums = [moment_summary.update(s, k, v, weight) for s, (k, v) in zip(sums, exact, strict=True)]
            pairs = [(pool.pack(k), pool.pack(v)) if room.packed else (k, v) for k, v in exact]
            score = self._informed(layout, room, score, sums, pairs, found.owner)
        kept = self._best(layout, bases, room, found, score)
        picked = pool.Picked.of(found, kept, state.store.tokens.k.shape[2], heads)
        stays = pool.of_heads(kept, size, heads, packed=room.packed)
        weight = jnp.any(stays, axis=1).astype(jnp.float32)
        store = codec.learn(layout, bases.codec, state.store, taps, lengths, weight)
        at = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (layout.batch, size))
        codes = codec.encode(layout, bases.codec, store, tuple(Tokens(tap.k, tap.k_pre, tap.v, at) for tap in taps))
        codes = [picked.take(pool.pack(x) if room.packed else x) for x in codes]
        store = hold(store, *codes, picked.length, picked.positions(heads))
        far = None if state.far_votes is None else picked.take(found.votes)
        return dataclasses.replace(state, store=store, far_votes=far), stays

    def limit(self, layout, lengths):
        room = jnp.maximum(lengths, layout.capacity)  # no constant: on a mesh it lies where the lengths do
        for bases in set(self.codec.default_bases(layout.spec)):
            ends = self.ends_of(layout, self.of_group(bases))
            if not ends.flushes:
                room = jnp.minimum(room, tail_limit(layout, lengths, ends.sinks + ends.recent))
        return room

    # ---- a block of new tokens ----------------------------------------------------------------------------------

    def append(self, layout, bases, state, taps, counts, positions, place):
        ends = list(state.ends)
        ends[place.index] = exact_tokens.append(ends[place.index], taps.k, taps.v, counts)
        state = dataclasses.replace(state, ends=tuple(ends))
        if self.selection is not None and self.selection.schedule == "paper" and taps.k.shape[1] == 1:
            return evict_one(self, layout, self.of_group(bases), state, taps.q, counts)
        return state

    def attend(self, layout, bases, state, q, positions, place):
        parts = self._retained(layout, self.of_group(bases), state, q, positions, place)
        if self.standing is not None and place.window is None:  # moments do not know which left a sliding window
            parts.append(moment_summary.partial(state.gone[place.index], q, layout.spec.scale))
        return merge(parts)

    def retained(self, layout, bases, state, q, positions, place):
        """Attention over the tokens that are still there."""
        return merge(self._retained(layout, self.of_group(bases), state, q, positions, place))

    def _retained(self, layout, bases, state, q, positions, place):
        rule, ends, scale = self.selection, state.ends[place.index], layout.spec.scale
        window = place.window
        if rule is not None and rule.keeps_none and self.standing is None:
            window = min(self.ends_of(layout, bases).recent, window or layout.capacity)
        if rule is not None and (rule.positions == "cache" or window != place.window):
            return attend_by_index(self, layout, bases, state, q, positions, place, window)
        parts = [exact_tokens.attend(ends, q, positions, scale=scale, window=window)]
        if state.store is not None:
            parts.append(self.codec.attend(layout, bases.codec, self._read(layout, state, q, place), q, positions, place))
        return parts

    def _read(self, layout, state, q, place):
        """The store with the pages alone that the queries need."""
        if not state.marks or place.window is not None:  # a sliding window is one run of tokens
            return state.store
        reading, marks, tokens = self.standing_reading, state.marks[place.index], state.store.tokens
        there = jax.tree.leaves(marks)[0].shape[2]
        count = reading.pages(layout, there)
        if count >= there:
            return state.store
        units = tokens.k.shape[1]
        chosen = pages.choose(reading, marks, tokens.length, q, layout.spec.scale, units, count)
        return dataclasses.replace(state.store, tokens=pages.take(tokens, chosen, reading.page, layout.spec.kv_heads))

    def observe(self, layout, bases, state, q, lse, positions, place):
        if self.selection is None or not self.selection.votes:
            return state
        return voting.observe(self, layout, self.of_group(bases), state, q, lse, positions, place)

    # ---- between blocks -----------------------------------------------------------------------------------------

    def refresh(self, layout, bases, state):
        bases = self.of_group(bases)
        ends = self.ends_of(layout, bases)
        if not ends.flushes:
            return state
        if self.selection is not None:
            return self._refresh_selected(layout, bases, state)
        if not ends.wait:
            return self._refresh_all(layout, bases, state)
        full = jnp.any(state.ends[0].length >= ends.sinks + ends.recent + ends.wait)
        return jax.lax.cond(full, lambda s: self._refresh_all(layout, bases, s), lambda s: s, state)

    def _refresh_all(self, layout, bases, state):
        ends, codec = self.ends_of(layout, bases), self.codec
        stay, most = ends.stay, ends.most(layout)
        if ends.wait:  # rows that have not gathered enough wait on
            length = state.ends[0].length
            stay = jnp.where(length >= ends.sinks + ends.recent + ends.wait, stay, length)
        ahead = codec.ahead(layout)
        tokens = tuple(self.oldest(layout, part, ends.first, most + ahead) for part in state.ends)
        flushed = [exact_tokens.flush(part, ends.first, stay, most, ends.unit) for part in state.ends]
        counts = flushed[0][1].counts
        seen = jnp.clip(state.ends[0].length - ends.first, 0, tokens[0].k.shape[1])
        start = state.store.tokens.length if state.marks else None
        store = codec.extend(layout, bases.codec, state.store, tokens, counts, seen)
        marks = self._marked(state.marks, tokens, start, counts)
        return dataclasses.replace(state, ends=tuple(part for part, _ in flushed), store=store, marks=marks)

    def oldest(self, layout: Layout, part: exact_tokens.Exact, first: int, size: int) -> Tokens:
        """The next tokens that leave an exact segment, and those ahead of them."""
        size = min(size, part.k.shape[2] - first)
        k, v = (x[:, :, first : first + size].swapaxes(1, 2) for x in (part.k, part.v))
        positions = part.positions.at(first + jnp.arange(size))
        if layout.spec.rope is None:
            return Tokens(k, k, v, positions)
        cos, sin = rope_angles(layout.spec.rope, positions[:, :, None])
        return Tokens(k, rotate(k.astype(jnp.float32), cos, -sin), v, positions)

    def _refresh_selected(self, layout, bases, state):
        rule, codec, spec = self.selection, self.codec, layout.spec
        ends, most = self.ends_of(layout, bases), layout.block
        tokens = tuple(self.oldest(layout, part, ends.first, most) for part in state.ends)
        state, counts, votes = voting.flush(state, ends, most)
        there = jnp.arange(most)[None] < counts[:, None]
        valid = jnp.broadcast_to(there[:, None], votes.shape)
        if state.store is None:
            gone = tuple(
                moment_summary.update(sums, *_by_head(new.k, new.v), valid)
                for sums, new in zip(state.gone, tokens, strict=False)
            )
            return dataclasses.replace(state, gone=gone)
        store = codec.adapt(layout, bases.codec, state.store, tokens, there.astype(jnp.float32))
        codes = codec.encode(layout, bases.codec, store, tokens)
        state, room = dataclasses.replace(state, store=store), self.room(layout, bases)
        position = jnp.broadcast_to(tokens[0].positions[:, None], votes.shape).astype(jnp.int32)
        fresh = pool.arrange(room, position, votes, valid)
        found = pool.join(pool.stored(state), fresh)
        k, v = (pool.joined_codes(old, new, room) for old, new in zip(codes_of(store), codes, strict=True))
        score = found.votes
        if rule.statistics:
            where = PerHead(found.position, found.owner, spec.kv_heads)
            pairs = [codec.decode(layout, bases.codec, store, k, v, where, i) for i in range(len(state.gone))]
            score = self._informed(layout, room, score, state.gone, pairs, found.owner)
        waits = (counts == 0)[:, None, None]  # what was chosen stays, though budgets of heads were rounded
        kept = jnp.where(waits, found.valid, self._best(layout, bases, room, found, score))
        picked = pool.Picked.of(found, kept, store.tokens.k.shape[2], spec.kv_heads)
        state = self.sum_up(layout, bases, state, room, found, kept, k, v)
        store = hold(store, picked.take(k), picked.take(v), picked.length, picked.positions(spec.kv_heads))
        state = dataclasses.replace(state, store=store)
        if state.far_votes is None:
            return state
        fade = jnp.where(waits, 1.0, rule.decay)
        return dataclasses.replace(
            state, near_votes=fade * state.near_votes, far_votes=fade * picked.take(found.votes)
        )

    # ---- the choice ---------------------------------------------------------------------------------------------

    def _best(self, layout, bases, room: Room, found: pool.Candidates, score) -> jax.Array:
        """Which candidates stay, bool `[B, J, S]`."""
        ends, rule = self.ends_of(layout, bases), self.selection
        allocation = rule.allocation_of(room.tokens, ends.sinks, ends.recent) if room.packed else None
        return pool.best(found, score, room.tokens, layout.spec.kv_heads, allocation)

    def _informed(self, layout, room: Room, score, sums, pairs, owner):
        """The score in the light of each layer's moments, summed over layers and over the heads of a unit.

        Args:
            pairs: of each layer keys after RoPE and values `[B, K, S, D]`, or `[B, 1, S, D]` of packed tokens.
        """
        rule, scale, total = self.selection, layout.spec.scale, 0.0
        for own, (k, v) in zip(sums, pairs, strict=True):
            if room.packed:
                k, v = (pool.owned_rows(x, owner) for x in (k, v))
                total = total + rule.informed(score, own, k, v, owner, scale)
            else:
                each = jnp.repeat(score, k.shape[1] // score.shape[1], axis=1)
                each = rule.informed(each, own, k, v, None, scale)
                total = total + each.reshape(*score.shape[:2], -1, score.shape[2]).sum(2)
        return total

    def sum_up(self, layout, bases, state, room: Room, found: pool.Candidates, kept, k, v):
        """Add the candidates that are not kept, with codes `[B, J, S, R]`, to the moments of every layer."""
        if not state.gone:
            return state
        heads, store = layout.spec.kv_heads, state.store
        leaving = found.valid & ~kept
        most = heads * (layout.block + 1) if room.packed else layout.block
        slots = pool.compact(leaving, min(most, leaving.shape[-1]))
        there = jnp.arange(slots.shape[-1]) < leaving.sum(-1, keepdims=True)
        k, v, position = (pool.take_slots(x, slots) for x in (k, v, found.position))
        owner = None if found.owner is None else pool.take_slots(found.owner, slots)
        weight = pool.of_owners(there, owner, heads)
        where = PerHead(position, owner, heads)
        gone = tuple(
            moment_summary.update(sums, *self.codec.decode(layout, bases.codec, store, k, v, where, i), weight)
            for i, sums in enumerate(state.gone)
        )
        return dataclasses.replace(state, gone=gone)

    def fault(self, groups):
        return self.codec.fault(tuple(group.store for group in groups))


def _by_head(k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    return k.swapaxes(1, 2), v.swapaxes(1, 2)
