"""StreamingKV: Palu's projections whose last columns follow the text by the Generalised Hebbian Algorithm."""

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.attention.spec import Taps
from lowrank_kv_jax.codecs.component_bits import mean_bits
from lowrank_kv_jax.codecs.frame import Frame
from lowrank_kv_jax.codecs.lowrank import of_each_row
from lowrank_kv_jax.codecs.palu import SIDES, GroupedProjections, PaluBases
from lowrank_kv_jax.estimators.gha_tail import STEP_SCALES, TRIANGLES, update_tail
from lowrank_kv_jax.estimators.linalg import orthonormalise
from lowrank_kv_jax.method import Layout, register
from lowrank_kv_jax.method.codec import Tokens
from lowrank_kv_jax.segments.coded import Coded, change_tokens
from lowrank_kv_jax.storage import precise
from lowrank_kv_jax.storage.cache_dtype import narrow
from lowrank_kv_jax.storage.steps import Steps

if TYPE_CHECKING:
    from lowrank_kv_jax.method.cache import Cache

_PRINTED = {
    "form": "encoder", "step": 10, "scale": "sum", "frozen_outputs": True, "update": "joint", "learn_from": "token",
    "rank_by": "fisher-roots", "rank_multiple": 32, "sinks": 0, "recent": 0,
}


def _table_5(rank: float, iterations: int, eta: float, alpha: float) -> dict[str, Any]:
    return {**_PRINTED, "rank": rank, "iterations": iterations, "iterations_dec": iterations, "eta": eta, "eta_dec": eta,
            "alpha": alpha}


@register("streamingkv")
@dataclasses.dataclass(frozen=True)
class StreamingKV(GroupedProjections):
    """Test-time updates of the last p = floor(alpha R) columns, the directions of the smallest singular values.

    The rule runs on the tokens that the projections give (x in Algorithm 1, d_h channels wide), around their mean where
    there is one, over the whole prompt before it is coded, and while decoding once every `step` tokens, on tokens that
    leave the exact window. Updates of a block happen at its refresh, before its tokens are coded. The learned columns
    are state, of each row its own, and start from the calibrated ones with every prompt; `carried` takes them along.

    Two forms, and who reads older latents after an update:

    * "coupled" (the default): encoder and decoder are one orthonormal basis and move together. Stored latents are
      transported into the moved basis, C <- C U_old^T U_new; `transport=False` re-reads them in it, which is wrong and
      only there to measure what that costs.
    * "encoder" (the paper): the encoder moves and the decoder stays. Every latent, old or new, is read by the calibrated
      decoder; nothing is transported. What the encoder gains beyond the decoder's span is lost on reading.

    Presets are the rows of the paper's table 5 (`longbench-llama-2-7b-30` and so on: 30 and 50 percent less than the full
    cache) and `paper`, the one for Mistral at 50: printed rule, printed steps. Defaults are what measured best.

    Attributes:
        form: "coupled" or "encoder".
        alpha: share of the columns that move, in (0, 1].
        eta, eta_dec: step sizes at prefill and while decoding; 0 does not update there.
        iterations, iterations_dec: steps on the same tokens, n_iters.
        step: decoded tokens from one update to the next, s (10 in the paper). An interval that a refresh cuts is learned
            in two parts.
        learn_from: "interval", an update sees all tokens since the last one; "token", only the one it falls on (the
            paper).
        update: "group", each group of heads its own projector; "joint", one over all groups, whose columns may read
            every head. Latents of several groups then are one latent, and rebuilding costs as many times more as there
            are groups. (The same where there is one group.)
        triangle, scale, frozen_outputs: of the rule, see `update_tail`.
        transport: see above.
    """

    form: str = "coupled"
    alpha: float = 0.2
    eta: float = 1.0
    eta_dec: float = 1.0
    iterations: int = 10
    iterations_dec: int = 1
    step: int = 32
    learn_from: str = "interval"
    update: str = "group"
    triangle: str = "sanger"
    scale: str = "bound"
    frozen_outputs: bool = False
    transport: bool = True

    adapts: ClassVar[bool] = True
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": _table_5(0.5, 2, 5e-6, 0.2),
        "longbench-llama-2-7b-30": _table_5(0.7, 3, 1e-6, 0.2),
        "longbench-llama-2-7b-50": _table_5(0.5, 3, 1e-5, 0.1),
        "longbench-longchat-7b-v1.5-30": _table_5(0.7, 3, 1e-6, 0.05),
        "longbench-longchat-7b-v1.5-50": _table_5(0.5, 3, 1e-5, 0.1),
        "longbench-mistral-7b-instruct-v0.2-30": _table_5(0.7, 3, 5e-6, 0.1),
        "longbench-mistral-7b-instruct-v0.2-50": _table_5(0.5, 2, 5e-6, 0.2),
        "ruler-llama-2-7b-50": _table_5(0.5, 3, 1e-6, 0.2),
        "ruler-mistral-7b-instruct-v0.2-50": _table_5(0.5, 3, 1e-5, 0.1),
    }

    def __post_init__(self):
        super().__post_init__()
        allowed = {
            "form": ("coupled", "encoder"), "learn_from": ("interval", "token"), "update": ("group", "joint"),
            "triangle": TRIANGLES, "scale": STEP_SCALES,
        }
        for field, values in allowed.items():
            if getattr(self, field) not in values:
                raise ValueError(f"{field}={getattr(self, field)!r}: allowed are {', '.join(values)}")
        if not 0 < self.alpha <= 1:
            raise ValueError(f"alpha={self.alpha!r}: must lie in (0, 1], the share of the columns that move")
        for field in ("eta", "eta_dec"):
            if not (math.isfinite(getattr(self, field)) and getattr(self, field) >= 0):
                raise ValueError(f"{field}={getattr(self, field)!r}: must be a finite number of at least 0")
        for field in ("iterations", "iterations_dec", "step"):
            if not isinstance(getattr(self, field), int) or getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)!r}: must be an int of at least 1")
        if self.update == "joint" and mean_bits(self.bits) is not None:
            raise ValueError(f"update='joint', bits={self.bits!r}: latents of groups that are one have no order of their "
                             "variances, by which components get bits; give update=group, or bits of 8, 4 or 2")
        if self.hadamard:
            raise ValueError("hadamard=True: a Hadamard turn mixes all columns, and the last ones are no longer those of "
                             "the smallest singular values, which are what moves; use palu")

    # ---- bases --------------------------------------------------------------------------------------------------

    def view(self, bases: PaluBases) -> PaluBases:
        """The bases as the update sees them: for joint updates all groups as one, their moving columns last."""
        if self.update == "group" or bases.k.shape[0] == 1:
            return bases
        k, v = (_side_by_side(u, self._moving(u.shape[-1])) for u in (bases.k, bases.v))
        return bases._replace(k=k, v=v)

    def first_tails(self, bases: PaluBases) -> tuple[jax.Array, jax.Array]:
        """Moving columns of keys and values before anything was seen `[J, W, p]`, those that were carried over first.

        Raises:
            ValueError: columns that other fields have learned.
        """
        out = []
        for side in SIDES:
            carried, shape = getattr(bases, f"{side}_tail"), self._tail_shape(getattr(bases, side))
            if carried is not None and carried.shape != shape:
                raise ValueError(f"bases.{side}_tail has the shape {carried.shape}: must be {shape} for "
                                 f"update={self.update!r}, alpha={self.alpha!r}; carry what these fields have learned")
            out.append(getattr(self.view(bases), side)[..., -shape[-1] :] if carried is None else carried)
        return out[0], out[1]

    def _tail_shape(self, basis: jax.Array) -> tuple[int, int, int]:
        """Of the moving columns of bases `[J, W, R]`: `[J, W, p]`, or where they move jointly `[1, J W, J p]`."""
        groups, width, rank = basis.shape
        moving = self._moving(rank)
        return (1, groups * width, groups * moving) if self.update == "joint" else (groups, width, moving)

    def _moving(self, rank: int) -> int:
        """p of a rank; at least one column."""
        return max(1, math.floor(self.alpha * rank))

    def frame(self, spec, bases, store):
        use = self.view(bases)
        frame = Frame(use.k, use.v, use.k_mean, use.v_mean)
        if store is None:
            return frame
        k, v = _joined(use.k, store.k_basis), _joined(use.v, store.v_basis)
        return frame._replace(k_encoder=k, v_encoder=v) if self.form == "encoder" else frame._replace(k=k, v=v)

    def empty(self, layout, bases, size, positions=None):
        """Moving columns are float32, since small steps vanish in 16 bits."""
        tails = of_each_row(layout, *self.first_tails(bases), dtype=jnp.float32)
        return self.empty_store(layout, bases, size, positions, *tails)

    # ---- learning -----------------------------------------------------------------------------------------------

    def learn(self, layout, bases, store, taps, lengths, weight):
        """Learned of all of a prompt, also of what stays exact or is not selected."""
        if self.eta:
            store = self._fitted(layout, bases, store, taps[0], lengths)
        return self.with_steps_of(layout, bases, store, taps, weight)

    def _fitted(self, layout, bases, store, tap, lengths):
        """The store with moving columns that have learned of a prompt."""
        weight = (jnp.arange(tap.k.shape[1])[None] < lengths[:, None]).astype(jnp.float32)
        moved = {}
        for side, x in self._tokens(layout, bases, tap).items():
            lead, tail = self._columns(bases, store, side)
            new = self._update(lead, tail, x, weight, self.eta, self.iterations)
            moved[f"{side}_basis"] = self._settle(lead, new)
        return dataclasses.replace(store, **moved)

    def adapt(self, layout, bases, store, tokens, weight):
        if self.eta_dec == 0:
            return store
        (one,) = tokens
        interval = one.positions // self.step
        first = interval[:, :1]
        count = jnp.max(jnp.where(weight > 0, interval - first, 0)) + 1
        if self.learn_from == "token":
            weight = weight * (one.positions % self.step == 0)
        moved, coefficients, held = {}, {}, store.tokens
        fed = jnp.any(weight > 0, axis=1)[:, None, None, None]  # settling alone moves the basis of a waiting row a little
        for side, x in self._tokens(layout, bases, one).items():
            lead, old = self._columns(bases, store, side)

            def learn(i, tail, lead=lead, x=x):
                return self._update(lead, tail, x, weight * (interval - first == i), self.eta_dec, self.iterations_dec)

            new = jnp.where(fed, self._settle(lead, jax.lax.fori_loop(0, count, learn, old)), old)
            moved[f"{side}_basis"] = new
            stored, steps = getattr(held, side), getattr(store, f"{side}_steps")
            if self.form == "coupled" and self.transport:
                stored, steps = _transport_tail(held, side, old, new, steps)
            coefficients[side], moved[f"{side}_steps"] = stored, steps
        return dataclasses.replace(store, tokens=dataclasses.replace(held, **coefficients), **moved)

    def _tokens(self, layout: Layout, bases: PaluBases, tokens: Tokens | Taps) -> dict[str, jax.Array]:
        """Centred tokens of each side by group `[B, J, T, W]`, float32."""
        start = self.frame(layout.spec, bases, None)
        return {
            side: x.astype(jnp.float32).reshape(*x.shape[:2], len(start.k), -1).swapaxes(1, 2)
            for side, x in zip(SIDES, start.centred(*self.sides(tokens)), strict=True)
        }

    def _columns(self, bases: PaluBases, store, side: str) -> tuple[jax.Array, jax.Array]:
        """Columns at rest `[J, W, R - p]` and moving ones `[B, J, W, p]`."""
        tail = getattr(store, f"{side}_basis")
        return getattr(self.view(bases), side)[..., : -tail.shape[-1]].astype(jnp.float32), tail

    def _update(self, lead, tail, x, weight, eta: float, iterations: int) -> jax.Array:
        return update_tail(
            lead, tail, x, weight[:, None], eta, iterations=iterations, triangle=self.triangle, scale=self.scale,
            frozen_outputs=self.frozen_outputs,
        )

    def _settle(self, lead: jax.Array, tail: jax.Array) -> jax.Array:
        """What is kept of an update: a basis that decodes too must be orthonormal."""
        if self.form == "encoder":
            return tail
        return orthonormalise(tail - precise.matmul(lead, precise.matmul(lead.mT, tail)))

    # ---- between prompts, and when it breaks ---------------------------------------------------------------------

    def carried(self, cache: "Cache", bases: tuple[PaluBases, ...], row: int = 0) -> tuple[PaluBases, ...]:
        """Bases that start the next prompt from what a row of a cache has learned; `bases` themselves start it anew.

        Columns that move jointly read heads of every group: they are carried as tails alone, beside the calibrated
        bases of each group.

        Raises:
            ValueError: a cache of another method, or a row that it does not have.
        """
        if cache.method != self or not 0 <= row < cache.layout.batch:
            raise ValueError(f"row={row} of a cache of {cache.method!r}: expected 0..{cache.layout.batch - 1} of a "
                             f"cache of {self!r}")
        out = []
        for own, group in zip(bases, cache.groups, strict=True):
            learned = {}
            for side in SIDES:
                basis, tail = getattr(own, side), getattr(group.store, f"{side}_basis")[row]
                learned[f"{side}_tail"] = tail
                if self.form == "coupled" and len(tail) == len(basis):
                    learned[side] = _joined(basis, tail).astype(basis.dtype)
            out.append(own._replace(**learned))
        return tuple(out)

    def fault(self, stores):
        broken = np.asarray(_broken(tuple((store.k_basis, store.v_basis) for store in stores)))
        if not broken.any():
            return None
        layer, row = (int(i[0]) for i in np.nonzero(broken))
        return (f"the update diverged in layer {layer} of row {row} (eta={self.eta}, eta_dec={self.eta_dec}, "
                f"scale={self.scale!r}): lower eta, or use scale='bound', where steps up to 1 are stable")


def _joined(basis: jax.Array, tail: jax.Array) -> jax.Array:
    """Columns at rest and moved ones, float32 `[J, W, R]`, or of each row `[B, J, W, R]`."""
    lead = basis[..., : -tail.shape[-1]].astype(tail.dtype)
    return jnp.concatenate([jnp.broadcast_to(lead, (*tail.shape[:-1], lead.shape[-1])), tail], axis=-1)


def _side_by_side(basis: jax.Array, tail: int) -> jax.Array:
    """Bases `[J, W, R]` of J groups as one `[1, J W, J R]`, zero between groups, the last `tail` columns of each last."""
    groups, width, rank = basis.shape
    whole = jnp.einsum("jwr,ji->jwir", basis, jnp.eye(groups, dtype=basis.dtype)).reshape(groups * width, groups, rank)
    lead, last = (part.reshape(groups * width, -1) for part in (whole[..., : rank - tail], whole[..., rank - tail :]))
    return jnp.concatenate([lead, last], axis=-1)[None]


def _transport_tail(segment: Coded, side: str, old: jax.Array, new: jax.Array, steps: Steps | None) -> tuple[Any, Any]:
    """Coefficients of "k" or "v", to be read in a basis whose last columns have moved from `old` to `new` `[B, J, W, p]`,
    and what they count in, if in anything.

    What the columns at rest hold stays as it is; see `segments.coded.transport`.
    """
    move, rows = precise.matmul(old.mT, new), jnp.any(old != new, axis=(1, 2, 3))
    tail = move.shape[-1]
    before = after = None
    if steps is not None:
        before = Steps(steps.step[..., -tail:], steps.zero[..., -tail:])
        after = before.moved(move, rows)
        steps = Steps(steps.step, jnp.concatenate([steps.zero[..., :-tail], after.zero], axis=-1))

    return change_tokens(segment, side, _with_tail, rows, move, before, after), steps


def _with_tail(block: jax.Array, move: jax.Array, before: Steps | None, after: Steps | None) -> jax.Array:
    """Coefficients `[B, J, T, R]` with their last ones, as many as `move` has columns, read in the moved basis."""
    tail = move.shape[-1]
    last = block[..., -tail:].astype(jnp.float32) if before is None else before.widen(block[..., -tail:])
    last = precise.matmul(last, move)
    last = narrow(last, block.dtype) if after is None else after.count(last)
    return jnp.concatenate([block[..., :-tail], last], axis=-1)


@jax.jit
def _broken(tails: tuple[tuple[jax.Array, jax.Array], ...]) -> jax.Array:
    """Of every layer and row `[L, B]`, whether a column is not finite."""
    finite = [jnp.all(jnp.isfinite(k), axis=(1, 2, 3)) & jnp.all(jnp.isfinite(v), axis=(1, 2, 3)) for k, v in tails]
    return ~jnp.stack(finite)
