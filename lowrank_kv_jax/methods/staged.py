"""Caches that keep some tokens and evict the rest: selection x codec x summary.

    sinks | selected tokens, one set for each kv head | recent tokens, and those appended since the last refresh
    exact |       exact, or coefficients in a basis    | exact            ... and a summary of what was evicted

Tokens that leave the recent window meet the selected ones as candidates; what the selection does not keep is evicted,
and with a summary its moments remain. Sinks and recent tokens are out of reach by construction.
"""

import abc
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lowrank_kv_jax.bits import Bits, bits_of
from lowrank_kv_jax.cache_dtype import narrow
from lowrank_kv_jax.method import KVMethod, Layout
from lowrank_kv_jax.methods.stages import VerbatimStage, attend_tokens
from lowrank_kv_jax.partial import AttnPartial, merge
from lowrank_kv_jax.positions import PerHead
from lowrank_kv_jax.rope import rope_angles, rotate
from lowrank_kv_jax.segments import exact as exact_tokens
from lowrank_kv_jax.selection.adakv import head_budgets
from lowrank_kv_jax.selection.retain import compact, head_counts, ranks, take_slots
from lowrank_kv_jax.selection.votes import decoding_votes
from lowrank_kv_jax.state import leaf, state, take_tokens, walk
from lowrank_kv_jax.summaries import moments as moment_summary


@state
class StagedState:
    """One layer's cache.

    Attributes:
        held: exact tokens and selected ones, as the codec stores them.
        near_votes: scores of the exact tokens `[B, K, E]`, float32.
        far_votes: scores of the selected tokens `[B, J, M]`, float32.
        evicted: statistics of what is no longer there.
    """

    held: Any
    near_votes: jax.Array | None = leaf("batch", "kv_heads", "tokens", kind="indices")
    far_votes: jax.Array | None = leaf("batch", "kv_heads", "tokens", kind="indices")
    evicted: moment_summary.Moments | None


class Candidates(NamedTuple):
    """Tokens among which a selection chooses; J = K heads, or 1 where heads are packed or share their tokens.

    k, v: codes `[B, J, S, R]`; position int32, votes float32, valid bool `[B, J, S]`; owner int8 `[B, 1, S]` or None.
    """

    k: jax.Array
    v: jax.Array
    position: jax.Array
    votes: jax.Array
    valid: jax.Array
    owner: jax.Array | None


class Shape(NamedTuple):
    """Of a group's state: mode "per_head", "packed" or "joint"; J buffers of `size` slots; tokens a head keeps."""

    mode: str
    buffers: int
    size: int
    tokens: int


@dataclasses.dataclass(frozen=True)
class Staged(KVMethod):
    """Abstract. A cache made of a selection, a codec and a summary."""

    @abc.abstractmethod
    def selection_stage(self) -> Any:
        """The rule that selects, a `Selecting`."""

    def codec_stage(self) -> Any:
        """How selected tokens are stored."""
        return VerbatimStage()

    def summary_stage(self) -> Any:
        """A `Summary` of what was evicted, or None."""
        return None

    # ---- shapes -------------------------------------------------------------------------------------------------

    def ends(self, layout: Layout) -> tuple[int, int]:
        """Sinks and recent tokens."""
        rule = self.selection_stage()
        return rule.sinks, rule.recent_tokens(layout)

    def shape_for(self, layout: Layout, bases: Any, tokens: int) -> Shape:
        """The shape with `tokens` selected tokens a head."""
        rule, codec, heads = self.selection_stage(), self.codec_stage(), layout.spec.kv_heads
        if rule.adaptive:
            # official allocations round: half a token a head
            return Shape("packed", 1, heads * tokens + heads // 2, tokens)
        buffers = codec.heads(layout, self.codec_bases(bases))
        return Shape("per_head" if buffers == heads else "joint", buffers, codec.slots(tokens), tokens)

    def shape(self, layout: Layout, bases: Any) -> Shape:
        """The shape that the budget asks for."""
        rule, (sinks, recent) = self.selection_stage(), self.ends(layout)
        if rule.budget_bytes is not None:
            tokens = _tokens_for_bytes(self, layout, bases, rule.budget_bytes)
        else:
            tokens = max(rule.tokens(layout) - sinks - recent, 0)
        return self.shape_for(layout, bases, self.layer_tokens(layout, bases, tokens))

    def layer_tokens(self, layout: Layout, bases: Any, tokens: int) -> int:
        """Selected tokens a head of one layer, where every layer has `tokens` on average."""
        rule, (sinks, recent) = self.selection_stage(), self.ends(layout)
        room = max(layout.capacity - sinks - recent, 1)
        tokens = rule.of_layer(tokens, room if rule.decoding == "evict" else layout.prompt - recent, bases)
        return min(max(tokens, 0 if rule.keeps_none else 1), room)

    def codec_bases(self, bases: Any) -> Any:
        """What of a group's bases belongs to the codec."""
        return bases

    # ---- the contract -------------------------------------------------------------------------------------------

    def init(self, layout: Layout, bases: Any) -> StagedState:
        return self.init_shape(layout, bases, self.shape(layout, bases))

    def init_shape(self, layout: Layout, bases: Any, shape: Shape) -> StagedState:
        """An empty state of a given shape."""
        spec, rule, summary = layout.spec, self.selection_stage(), self.summary_stage()
        sinks, recent = self.ends(layout)
        room = layout.block if rule.decoding == "evict" else max(layout.capacity - layout.prompt, layout.block)
        exact = exact_tokens.empty_exact(
            layout.batch, spec.kv_heads, sinks + recent + room, spec.head_dim, jnp.dtype(layout.dtype),
            gaps=(sinks, sinks),
        )
        # where heads share their tokens, one list says which, however many buffers hold their codes
        where = (layout.batch, 1 if shape.mode == "joint" else shape.buffers, shape.size)
        owner = jnp.zeros(where, jnp.int8) if shape.mode == "packed" else None
        positions = PerHead(jnp.zeros(where, jnp.int32), owner, spec.kv_heads)
        held = self.codec_stage().empty(
            layout, self.codec_bases(bases), exact, shape.buffers, shape.size, positions
        )
        near = jnp.zeros((layout.batch, spec.kv_heads, exact.k.shape[2]), jnp.float32) if rule.votes else None
        far = jnp.zeros(where, jnp.float32) if rule.votes and shape.size else None
        order = summary.order if summary is not None else rule.statistics
        dtype = jnp.dtype(summary.dtype if summary is not None else "float32")
        evicted = order and moment_summary.empty_moments(layout.batch, spec.kv_heads, spec.head_dim, order, dtype)
        return StagedState(held, near, far, evicted or None)

    def compress(self, layout, bases, state, taps, lengths):
        (tap,) = taps
        rule, codec, own = self.selection_stage(), self.codec_stage(), self.codec_bases(bases)
        rule.check_prompt(layout)
        sinks, recent = self.ends(layout)
        shape = self.shape(layout, bases)
        held = codec.begin(layout, own, state.held, tap, lengths)
        exact = exact_tokens.hold_prompt(held.exact, tap.k, tap.v, lengths, sinks, recent)
        state = dataclasses.replace(state, held=dataclasses.replace(held, exact=exact))
        votes = rule.prompt_scores(layout, tap, lengths)
        slots = jnp.arange(layout.prompt, dtype=jnp.int32)
        middle = (slots >= sinks) & (slots < lengths[:, None] - recent)
        valid = jnp.broadcast_to(middle[:, None], votes.shape)
        if state.near_votes is not None:
            state = dataclasses.replace(state, near_votes=_near_votes(state.near_votes, exact, votes))
        weight = valid
        if held.coded is not None:
            k, v = codec.encode_prompt(layout, own, held, tap)
            position = jnp.broadcast_to(slots, votes.shape)
            found = _arrange(shape, k, v, position, votes, valid)
            state, kept = self._choose(layout, bases, state, shape, found, first=True)
            weight = valid & ~jnp.broadcast_to(kept.reshape(*kept.shape[:1], -1, layout.prompt), votes.shape)
        if state.evicted is not None:
            k, v = (x.swapaxes(1, 2) for x in (tap.k, tap.v))
            state = dataclasses.replace(state, evicted=moment_summary.update(state.evicted, k, v, weight))
        return state

    def limit(self, layout, lengths):
        if self.selection_stage().decoding == "evict":
            return super().limit(layout, lengths)
        return exact_tokens.tail_limit(layout, lengths, sum(self.ends(layout)))

    def append(self, layout, bases, state, taps, counts, positions, place):
        exact = exact_tokens.append(state.held.exact, taps.k, taps.v, counts)
        state = dataclasses.replace(state, held=dataclasses.replace(state.held, exact=exact))
        if self.selection_stage().schedule == "paper" and taps.k.shape[1] == 1:
            return self._evict_one(layout, bases, state, taps.q, counts > 0)
        return state

    def attend(self, layout, bases, state, q, positions, place):
        parts, summary = self._retained_parts(layout, bases, state, q, positions, place), self.summary_stage()
        if summary is not None and place.window is None:  # moments do not know which tokens left a sliding window
            parts.append(moment_summary.partial(state.evicted, q, layout.spec.scale))
        return merge(parts)

    def retained(self, layout, bases, state, q, positions, place) -> AttnPartial:
        """Attention over the tokens that are still there."""
        return merge(self._retained_parts(layout, bases, state, q, positions, place))

    def _retained_parts(self, layout, bases, state, q, positions, place) -> list[AttnPartial]:
        spec, held = layout.spec, state.held
        if self.selection_stage().positions == "cache" and spec.rope is not None:
            return self._attend_rotated(layout, state, q, positions, place)
        parts = [exact_tokens.attend(held.exact, q, positions, scale=spec.scale, window=place.window)]
        if held.coded is not None:
            parts.append(self.codec_stage().attend(layout, self.codec_bases(bases), held, q, positions, place))
        return parts

    def observe(self, layout, bases, state, q, lse, positions, place):
        rule = self.selection_stage()
        if not rule.votes:
            return state
        held, spec = state.held, layout.spec
        exact = held.exact
        slots = jnp.arange(exact.k.shape[2])
        at = exact.positions.at(slots)
        there = slots[None] < exact.length[:, None]
        last = jnp.max(jnp.where(there, at, -1), axis=1)
        voter = (positions <= last[:, None])[:, None, :, None, None]  # rows may be padded, or have ended
        seen = _seen(voter, at[:, None], there[:, None], positions, place.window)
        votes = functools.partial(
            decoding_votes, lse=lse, scale=spec.scale, vote=rule.vote, positions=positions
        )
        state = dataclasses.replace(state, near_votes=state.near_votes + votes(q, exact.k, seen=seen))
        if held.coded is None:
            return state
        read = self.codec_stage().readable(layout, self.codec_bases(bases), held, q)
        where, slots = held.coded.positions, jnp.arange(held.coded.k.shape[2])
        there = (slots[None] < held.coded.length[:, None])[:, None]
        seen = _seen(voter, where.position, there, positions, place.window)
        if where.owner is not None:
            seen = seen & where.owned(slots, spec.q_heads)
        far = votes(read.q, read.keys, seen=seen)
        if far.shape[1] != state.far_votes.shape[1]:
            far = far.sum(1, keepdims=True)
        return dataclasses.replace(state, far_votes=state.far_votes + far)

    def refresh(self, layout, bases, state):
        rule, codec, own = self.selection_stage(), self.codec_stage(), self.codec_bases(bases)
        if rule.decoding == "keep":
            return state
        shape, most = self.shape(layout, bases), layout.block
        state, left, votes = self._flush(layout, state, most)
        flushed = jnp.arange(most)[None] < left.counts[:, None]
        valid = jnp.broadcast_to(flushed[:, None], votes.shape)
        if state.held.coded is None:
            if state.evicted is None:
                return state
            return dataclasses.replace(state, evicted=moment_summary.update(state.evicted, left.k, left.v, valid))
        k, v = (x.swapaxes(1, 2) for x in (left.k, left.v))
        held, k, v = codec.take_in(layout, own, state.held, k, v, left.positions, flushed.astype(jnp.float32))
        state = dataclasses.replace(state, held=held)
        position = jnp.broadcast_to(left.positions[:, None], votes.shape).astype(jnp.int32)
        found = _join(_kept(state), _arrange(shape, k, v, position, votes, valid))
        state, kept = self._choose(layout, bases, state, shape, found, waits=left.counts == 0)
        if state.evicted is not None:
            state = self._sum_up(layout, own, state, shape, found, kept)
        return _fade(state, rule.decay, left.counts > 0)

    # ---- eviction -----------------------------------------------------------------------------------------------

    def _flush(self, layout, state, most: int, rows: jax.Array | bool = True):
        """Take up to `most` tokens out of the recent window of `rows` `[B]`; the state, the tokens and their votes
        `[B, K, most]`."""
        sinks, recent = self.ends(layout)
        exact, left = exact_tokens.flush(state.held.exact, sinks, jnp.where(rows, recent, layout.capacity), most)
        near = state.near_votes
        if near is None:
            votes = jnp.zeros((layout.batch, layout.spec.kv_heads, most), jnp.float32)
        else:
            votes = near[:, :, sinks : sinks + most]
            tail = take_tokens(near[..., None], sinks + left.counts, near.shape[2] - sinks)[..., 0]
            there = jnp.arange(tail.shape[2]) + sinks < exact.length[:, None, None]
            near = near.at[:, :, sinks:].set(jnp.where(there, tail, 0.0))
        held = dataclasses.replace(state.held, exact=exact)
        return dataclasses.replace(state, held=held, near_votes=near), left, votes

    def _choose(
        self, layout, bases, state, shape: Shape, found: Candidates, first: bool = False, waits: jax.Array | bool = False
    ):
        """Keep the best candidates; the state that holds them, and which they were, bool `[B, J, S]`.

        Args:
            first: nothing was evicted yet.
            waits: bool `[B]`, rows without new candidates: what was chosen stays, though budgets of heads were rounded.
        """
        rule, heads, held = self.selection_stage(), layout.spec.kv_heads, state.held
        score = found.votes
        if rule.statistics and state.evicted is not None:
            k, v = self.codec_stage().decode(layout, self.codec_bases(bases), held, found.k, found.v, found.position)
            sums = state.evicted
            if first and rule.prefill == "informed":
                sums = moment_summary.update(sums, k, v, _by_head(found, found.valid, heads))
            score = rule.informed(score, sums, k, v, found.owner, layout.spec.scale)
        score = jnp.where(found.valid, score, -jnp.inf)
        if found.owner is None:
            kept = found.valid & (ranks(score) < shape.tokens)
        else:
            floor, share, allocation = rule.allocation_of(shape.tokens, *self.ends(layout))
            budgets = head_budgets(score[:, 0], found.owner[:, 0], heads, shape.tokens, floor, share, allocation)
            most = jnp.take_along_axis(budgets[:, None], found.owner.astype(jnp.int32), axis=2)
            kept = found.valid & (ranks(score[:, 0], found.owner[:, 0], heads)[:, None] < most)
        kept = jnp.where(jnp.reshape(waits, (-1, 1, 1)), found.valid, kept)
        slots = compact(kept, shape.size)
        length = jnp.minimum(kept.sum(-1, dtype=jnp.int32)[:, 0], shape.size)
        owner = None if found.owner is None else take_slots(found.owner, slots)
        coded = self.codec_stage().hold(
            held.coded, take_slots(found.k, slots), take_slots(found.v, slots), length,
            PerHead(take_slots(found.position, slots), owner, heads),
        )
        far = None if state.far_votes is None else take_slots(found.votes, slots)
        return dataclasses.replace(state, held=dataclasses.replace(held, coded=coded), far_votes=far), kept

    def _sum_up(self, layout, own, state, shape: Shape, found: Candidates, kept):
        """Add the candidates that were not kept to the statistics."""
        heads = layout.spec.kv_heads
        gone = found.valid & ~kept
        most = layout.block if found.owner is None else heads * (layout.block + 1)
        slots = compact(gone, min(most, gone.shape[-1]))
        there = jnp.arange(slots.shape[-1]) < gone.sum(-1, keepdims=True)
        k, v, position = (take_slots(x, slots) for x in (found.k, found.v, found.position))
        k, v = self.codec_stage().decode(layout, own, state.held, k, v, position)
        owner = None if found.owner is None else take_slots(found.owner, slots)
        weight = _by_head(found._replace(owner=owner), there, heads)
        return dataclasses.replace(state, evicted=moment_summary.update(state.evicted, k, v, weight))

    def _evict_one(self, layout, bases, state, q, active):
        """Algorithm 1: one token leaves the recent window, and when the budget is full each head evicts one.

        alpha is the softmax of the current query over the retained tokens, summed over the query heads of a kv head.
        Rows that are not `active` `[B]` have no current query and stay as they are.
        """
        rule, spec, own = self.selection_stage(), layout.spec, self.codec_bases(bases)
        shape, heads = self.shape(layout, bases), spec.kv_heads
        state, left, votes = self._flush(layout, state, 1, active)
        valid = jnp.broadcast_to((left.counts > 0)[:, None, None], (layout.batch, heads, 1))
        position = jnp.broadcast_to(left.positions[:, None], valid.shape).astype(jnp.int32)
        fresh = _arrange(shape, left.k, left.v, position, votes, valid)
        old = _kept(state)
        found = _join(old, fresh)
        alpha = _alpha(spec, state.held.exact, found, q)
        k, v = self.codec_stage().decode(layout, own, state.held, found.k, found.v, found.position)
        score = rule.informed(alpha, state.evicted, k, v, found.owner, spec.scale) if rule.statistics else alpha
        score = jnp.where(found.valid, score, jnp.inf)
        owner = found.owner if found.owner is not None else jnp.zeros_like(found.position, jnp.int8)
        own_heads = heads if found.owner is not None else 1
        mine = owner[:, :, None] == jnp.arange(own_heads)[:, None]  # [B, J, heads of the buffer, S]
        worst = jnp.argmin(jnp.where(mine, score[:, :, None], jnp.inf), axis=-1)
        held_by = head_counts(found.valid, owner, own_heads)  # [B, J, heads of the buffer]
        # a packed buffer is full when its heads together are over the budget; each then loses one
        full = (held_by.sum(-1, keepdims=True) > own_heads * shape.tokens) & active[:, None, None]
        gone = jnp.any((jnp.arange(score.shape[-1]) == worst[..., None]) & full[..., None], axis=2) & found.valid
        kept = found.valid & ~gone
        if state.evicted is not None:
            state = self._sum_up(layout, own, state, shape, found, kept)
        state = _write_fresh(state, fresh, kept, shape.size)
        return _fade(state, rule.decay ** (1 / layout.block), left.counts > 0)

    # ---- re-rotation --------------------------------------------------------------------------------------------

    def _attend_rotated(self, layout, state, q, positions, place):
        """Keys count by their index in the cache: sinks and selected tokens move up to the recent ones."""
        spec, held = layout.spec, state.held
        sinks, _ = self.ends(layout)
        near = exact_tokens.part(held.exact, sinks, held.exact.k.shape[2])
        parts = [exact_tokens.attend(near, q, positions, scale=spec.scale, window=place.window)]
        begin = held.exact.positions.at(jnp.asarray([sinks]))[:, 0]  # position of the first recent token
        if held.coded is None:
            kept = jnp.zeros((layout.batch, spec.kv_heads), jnp.int32)
        else:
            where = held.coded.positions
            there = jnp.arange(held.coded.k.shape[2])[None, None] < held.coded.length[:, None, None]
            owner = jnp.zeros_like(where.position, jnp.int8) if where.owner is None else where.owner
            heads = 1 if where.owner is None else spec.kv_heads
            mine = there[:, :, None] & (owner[:, :, None] == jnp.arange(heads)[:, None])
            index = jnp.cumsum(mine, axis=-1) - 1
            index = jnp.sum(jnp.where(mine, index, 0), axis=2)
            kept = mine.sum(-1).reshape(layout.batch, -1)
            turn = jnp.where(there, sinks + index - where.position, 0)
            keys = rotate(held.coded.k, *rope_angles(spec.rope, turn))
        nearer = -jnp.maximum(begin[:, None] - sinks - kept, 0)  # [B, K], how far queries move
        nearer = jnp.where(held.exact.length[:, None] > sinks, nearer, 0)
        nearer = jnp.repeat(nearer, spec.group_size, axis=1)[:, None]
        moved = rotate(q, *rope_angles(spec.rope, nearer))
        if sinks:
            first = exact_tokens.part(held.exact, 0, sinks)
            parts.append(exact_tokens.attend(first, moved, positions, scale=spec.scale, window=place.window))
        if held.coded is not None:
            parts.append(attend_tokens(held.coded, keys, moved, positions, spec.scale, place.window))
        return parts


def _tokens_for_bytes(method: Staged, layout: Layout, bases: Any, budget: int) -> int:
    """Selected tokens a head such that a row of the cache takes at most `budget` bytes."""
    row = dataclasses.replace(layout, batch=1, mesh=None)

    def layer_bytes(tokens):
        shape = method.shape_for(row, bases, tokens)
        empty = jax.eval_shape(lambda: method.init_shape(row, bases, shape))
        return sum(math.prod(x.shape) * x.dtype.itemsize for _, x, _ in walk(empty))

    one, two = layer_bytes(1), layer_bytes(2)
    layers = method.selection_stage().default_bases(layout.spec)

    def spent(tokens):  # 12: length, limit and pending of the cache itself
        return 12 + sum(one + (two - one) * (method.layer_tokens(row, layer, tokens) - 1) for layer in layers)

    tokens = 1 + ((budget - 12) // layout.spec.num_layers - one) // (two - one)
    while tokens > 1 and spent(tokens) > budget:  # budgets that differ by layer are rounded, upwards on average
        tokens -= 1
    if tokens < 1 or spent(tokens) > budget:
        least = one * layout.spec.num_layers + 12
        raise ValueError(f"budget_bytes={budget}: sinks, recent tokens, room for a block and statistics take {least}")
    return tokens


def _seen(voter, position, there, q_positions, window):
    """Which tokens a voter sees: bool `[B, J, T, 1, S]`; position, there `[B, J, S]`."""
    key, query = position[:, :, None, None], q_positions[:, None, :, None, None]
    seen = voter & there[:, :, None, None] & (key <= query)
    return seen if window is None else seen & (key > query - window)


def _near_votes(empty, exact, votes):
    """Scores `[B, K, E]` of the exact tokens from those of the prompt `[B, K, S]`."""
    slots = jnp.arange(empty.shape[2])
    at = jnp.clip(exact.positions.at(slots), 0, votes.shape[2] - 1)
    there = slots[None] < exact.length[:, None]
    return jnp.where(there[:, None], jnp.take_along_axis(votes, at[:, None], axis=2), 0.0)


def _arrange(shape: Shape, k, v, position, votes, valid) -> Candidates:
    """Candidates from codes and `[B, K, S]` of each head, in the buffers of `shape`."""
    batch, heads, size = votes.shape
    if shape.mode == "per_head":
        return Candidates(k, v, position, votes, valid, None)
    if shape.mode == "joint":
        return Candidates(k, v, position[:, :1], votes.sum(1, keepdims=True), valid[:, :1], None)

    def pack(x):
        return x.reshape(batch, 1, heads * size, *x.shape[3:])

    owner = jnp.broadcast_to(jnp.arange(heads, dtype=jnp.int8)[:, None], votes.shape)
    return Candidates(*(pack(x) for x in (k, v, position, votes, valid, owner)))


def _by_head(found: Candidates, chosen: jax.Array, heads: int) -> jax.Array:
    """Which of the `chosen` `[B, J, S]` belong to each kv head: bool `[B, K, S]`."""
    if found.owner is None:
        return jnp.broadcast_to(chosen, (chosen.shape[0], heads, chosen.shape[2]))
    return chosen & (found.owner == jnp.arange(heads)[:, None])


def _kept(state: StagedState) -> Candidates:
    """The selected tokens as candidates."""
    coded = state.held.coded
    where = coded.positions
    valid = jnp.arange(coded.k.shape[2])[None, None] < coded.length[:, None, None]
    valid = jnp.broadcast_to(valid, where.position.shape)
    votes = state.far_votes if state.far_votes is not None else jnp.zeros(where.position.shape, jnp.float32)
    return Candidates(coded.k, coded.v, where.position, votes, valid, where.owner)


def _join(a: Candidates, b: Candidates) -> Candidates:
    pairs = zip(a, b, strict=True)
    return Candidates(*(None if x is None else jnp.concatenate([x, narrow(y, x.dtype)], axis=2) for x, y in pairs))


def _alpha(spec, exact, found: Candidates, q):
    """Attention of one query over everything retained, `[B, J, S]` of the candidates, summed over query heads."""
    groups = found.k.shape[1]
    slots = jnp.arange(found.k.shape[2])
    near = exact_tokens.attend(exact, q, jnp.full(q.shape[:2], jnp.iinfo(jnp.int32).max), scale=spec.scale)
    query = q[:, 0].reshape(q.shape[0], groups, -1, q.shape[-1])
    logits = jnp.einsum("bjgd,bjsd->bjgs", query, found.k.astype(q.dtype), preferred_element_type=jnp.float32)
    there = found.valid[:, :, None]
    where = PerHead(found.position, found.owner, spec.kv_heads)
    if found.owner is not None:
        there = there & where.owned(slots, spec.q_heads)[:, :, 0]
    logits = jnp.where(there, logits * spec.scale, -jnp.inf)
    near_lse = near.lse[:, 0].reshape(q.shape[0], groups, -1)
    lse = jnp.logaddexp(near_lse, jax.nn.logsumexp(logits, axis=-1))
    lse = jnp.where(jnp.isneginf(lse), 0.0, lse)
    return jnp.where(there, jnp.exp(logits - lse[..., None]), 0.0).sum(2)


def _fade(state: StagedState, share: float, rows: jax.Array) -> StagedState:
    """Leave `share` of the votes of `rows` `[B]`, those whose tokens moved on: a row that waits forgets nothing."""
    if state.near_votes is None or state.far_votes is None:
        return state
    left = jnp.where(rows, share, 1.0)[:, None, None]
    return dataclasses.replace(state, near_votes=left * state.near_votes, far_votes=left * state.far_votes)


def _write_fresh(state: StagedState, fresh: Candidates, kept, size: int) -> StagedState:
    """Put the kept ones of the fresh tokens into slots that were evicted or still free."""
    held, coded = state.held, state.held.coded
    news = fresh.k.shape[2]
    stays, comes = kept[:, :, :-news], kept[:, :, -news:]
    hole = compact(~stays, news)
    nth = jnp.cumsum(comes, axis=-1) - 1
    at = jnp.where(comes, jnp.take_along_axis(hole, jnp.maximum(nth, 0), axis=2), size)

    def put(buffer, new):
        if isinstance(buffer, Bits):
            return buffer.moved(put, bits_of(new))
        row = jax.vmap(jax.vmap(lambda b, n, i: b.at[i].set(narrow(n, b.dtype), mode="drop")))
        return row(buffer, new, at)

    where = coded.positions
    owner = None if where.owner is None else put(where.owner, fresh.owner)
    positions = PerHead(put(where.position, fresh.position), owner, where.kv_heads)
    length = kept.sum(-1, dtype=jnp.int32)[:, 0]
    coded = dataclasses.replace(coded, k=put(coded.k, fresh.k), v=put(coded.v, fresh.v), length=length,
                                positions=positions)
    far = None if state.far_votes is None else put(state.far_votes, fresh.votes)
    return dataclasses.replace(state, held=dataclasses.replace(held, coded=coded), far_votes=far)
