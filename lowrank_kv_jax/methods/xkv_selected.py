"""A selection of tokens before the fit of cross-layer bases, and a summary of what was dropped.

Layers that share coefficients share their tokens: the scores of a rule are summed over the heads of all layers of a
group. What is selected is coded, sinks and recent tokens and all that is appended stay exact, and the rest is dropped,
or lives on in moments of each layer.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from lowrank_kv_jax.codecs.basis import project
from lowrank_kv_jax.codecs.quantised import read_basis
from lowrank_kv_jax.layer_groups import LayerGroup, Ranks
from lowrank_kv_jax.method import KVMethod, Layout
from lowrank_kv_jax.methods.composed import Composed
from lowrank_kv_jax.methods.xkv import XKVState, ranks_for_bytes, side_by_side
from lowrank_kv_jax.partial import merge
from lowrank_kv_jax.segments import exact as exact_tokens
from lowrank_kv_jax.segments.merged import Listed
from lowrank_kv_jax.spec import Taps
from lowrank_kv_jax.state import state
from lowrank_kv_jax.summaries import moments as moment_summary


@state
class SelectedState:
    """The cache of a group of layers.

    Attributes:
        kept: exact and coded tokens.
        dropped: of each layer, moments of the tokens that are no longer there; none without a summary.
    """

    kept: XKVState
    dropped: tuple[moment_summary.Moments, ...]


@dataclasses.dataclass(frozen=True)
class GroupComposed(Composed):
    """Made by `select_for_groups`: the codec is cross-layer, selection and summary are as in `Composed`."""

    def layer_groups(self, spec):
        return self.codec.layer_groups(spec)

    def _codec(self, layout: Layout) -> Any:
        """The codec with the exact ends of the composition."""
        sinks, recent = self.ends(layout)
        return dataclasses.replace(self.codec, sinks=sinks, recent=recent)

    def _tokens(self, layout: Layout) -> int:
        """Coded tokens of a row."""
        sinks, recent = self.ends(layout)
        wanted = self.selection_stage().tokens(layout) - sinks - recent
        return max(min(wanted, layout.prompt - sinks - recent), 1)

    def ranks(self, layout: Layout, group: LayerGroup) -> Ranks:
        """Ranks of a group in a cache of this shape."""
        return group.ranks or ranks_for_bytes(self.codec, self, layout, group.layers)

    def fault(self, groups):
        return self.codec.fault(tuple(group.kept for group in groups))

    # ---- the contract --------------------------------------------------------------------------------------

    def init(self, layout, bases):
        return self.empty(layout, bases.layers, self.ranks(layout, bases))

    def empty(self, layout: Layout, layers: int, ranks: Ranks) -> SelectedState:
        """An empty state of a group with the given ranks."""
        size, spec, summary = self._tokens(layout), layout.spec, self.summary_stage()
        kept = self._codec(layout).empty(layout, layers, ranks, size)
        nowhere = Listed(jnp.zeros((layout.batch, size), jnp.int32))
        kept = dataclasses.replace(kept, coded=dataclasses.replace(kept.coded, positions=nowhere))
        if summary is None:
            return SelectedState(kept, ())
        moments = moment_summary.empty_moments(
            layout.batch, spec.kv_heads, spec.head_dim, summary.order, jnp.dtype(summary.dtype)
        )
        return SelectedState(kept, (moments,) * layers)

    def compress(self, layout, bases, state, taps, lengths):
        codec, kept = self._codec(layout), state.kept
        chosen, counts, middle = self._choose(layout, taps, lengths)
        weight = (jnp.arange(chosen.shape[1])[None] < counts[:, None]).astype(jnp.float32)
        keys, values = (
            side_by_side([jax.vmap(lambda x, i: x[i])(getattr(tap, side), chosen) for tap in taps], weight)
            for side in ("k_pre", "v")
        )
        fitted = codec.fit_group(layout, kept, keys, values)
        codes = (project(read_basis(u), x) for u, x in zip(fitted, (keys, values), strict=True))
        coded = codec.hold(layout, kept.coded, *codes, counts, Listed(chosen.astype(jnp.int32)))
        exact = tuple(
            exact_tokens.hold_prompt(segment, tap.k, tap.v, lengths, codec.sinks, codec.recent)
            for segment, tap in zip(kept.exact, taps, strict=True)
        )
        stays = jax.vmap(lambda i, w: jnp.zeros(layout.prompt).at[i].max(w))(chosen, weight) > 0
        dropped = tuple(
            _take_in(moments, tap, middle & ~stays) for moments, tap in zip(state.dropped, taps, strict=False)
        )
        return SelectedState(XKVState(exact, coded, *fitted), dropped)

    def _choose(self, layout: Layout, taps: tuple[Taps, ...], lengths: jax.Array):
        """Selected slots int32 `[B, M]`, ascending, how many of them hold, and which slots were to be had `[B, S]`."""
        rule, (sinks, recent) = self.selection_stage(), self.ends(layout)
        rule.check_prompt(layout)
        scores = sum(rule.prompt_scores(layout, tap, lengths).sum(1) for tap in taps)
        slots = jnp.arange(layout.prompt, dtype=jnp.int32)
        middle = (slots >= sinks) & (slots < lengths[:, None] - recent)
        size = self._tokens(layout)
        _, best = jax.lax.top_k(jnp.where(middle, scores, -jnp.inf), size)
        counts = jnp.minimum(middle.sum(1), size).astype(jnp.int32)
        there = jnp.arange(size)[None] < counts[:, None]
        chosen = jnp.sort(jnp.where(there, best, layout.prompt), axis=1)
        return jnp.minimum(chosen, layout.prompt - 1), counts, middle

    def append(self, layout, bases, state, taps, counts, positions, place):
        kept = self._codec(layout).append(layout, bases, state.kept, taps, counts, positions, place)
        return dataclasses.replace(state, kept=kept)

    def attend(self, layout, bases, state, q, positions, place):
        retained = self._codec(layout).attend(layout, bases, state.kept, q, positions, place)
        if not state.dropped or place.window is not None:  # moments do not know which tokens left a sliding window
            return retained
        return merge([retained, moment_summary.partial(state.dropped[place.index], q, layout.spec.scale)])

    def observe(self, layout, bases, state, q, lse, positions, place):
        return state

    def refresh(self, layout, bases, state):
        return state


def _take_in(moments: moment_summary.Moments, tap: Taps, out: jax.Array) -> moment_summary.Moments:
    k, v = (x.swapaxes(1, 2) for x in (tap.k, tap.v))
    return moment_summary.update(moments, k, v, jnp.broadcast_to(out[:, None], k.shape[:3]))


def select_for_groups(codec: KVMethod, selection: KVMethod, summary: Any) -> KVMethod:
    """A cross-layer codec behind a selection.

    Raises:
        ValueError: a selection whose tokens a group of layers cannot share, or that goes on after the prompt.
    """
    rule: Any = selection.as_selection()  # type: ignore[attr-defined]
    wrong = {
        "heads with budgets of their own": rule.adaptive,
        "a selection that keeps nothing between sinks and recent tokens": rule.keeps_none,
        "positions='cache'": rule.positions == "cache",
        "decoding='evict' (give decoding=keep)": rule.decoding != "keep",
        f"budget_bytes={rule.budget_bytes} (give keep or budget)": rule.budget_bytes is not None,
        "budgets that differ by layer": rule.layered,
        "statistics of its own": rule.statistics is not None or rule.summary_stage() is not None,
        f"recompress={codec.recompress}": codec.recompress is not None,  # type: ignore[attr-defined]
        f"rebuild={codec.rebuild}": codec.rebuild is not None,  # type: ignore[attr-defined]
    }
    for what, there in wrong.items():
        if there:
            raise ValueError(f"{codec.name}+{selection.name}: {what} cannot be combined with a cross-layer codec")
    return GroupComposed(codec, selection, summary)
