"""OjaKV: calibrated bases that follow the context by Oja's rule (Algorithm 1 of the paper)."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp

from lowrank_kv_jax.attention.importance import most_important, window_attention
from lowrank_kv_jax.codecs.frame import Frame
from lowrank_kv_jax.codecs.lowrank import LowRankStore, of_each_row
from lowrank_kv_jax.codecs.principal import Principal
from lowrank_kv_jax.estimators import Estimator, make_estimator
from lowrank_kv_jax.estimators.oja import NORMALIZATIONS, anchored_update, oja_update
from lowrank_kv_jax.method import register
from lowrank_kv_jax.method.token_share import share_of
from lowrank_kv_jax.segments.coded import change_of_basis, moved_rows, stored_moment, transport
from lowrank_kv_jax.storage.state import state

STORED = "stored"
LEARNS = ("keys", "queries_and_keys")
MARGIN = 2  # directions that an estimator of bounded size keeps for each column of the basis


@state
class LearningStore(LowRankStore):
    """Coefficients, and what the estimators of its key and value bases know."""

    k_learned: Any
    v_learned: Any


@register("ojakv")
@dataclasses.dataclass(frozen=True)
class OjaKV(Principal):
    """Hybrid storage and two-phase online updates.

    At prefill one Oja step on the `top` share of the prompt's tokens to which its last `window` queries attend most;
    while decoding one step on the tokens that leave the exact window, at every refresh.

    The paper's own settings are the preset `ojakv:paper` (table 5: eta 0.1 and 0.05, the 5% most attended tokens, the
    printed rule; keys after RoPE, head by head). On real activations the printed rule destroys the basis, and the most
    attended tokens, most of them recent, are too few and too much alike to learn from. The defaults are what measured
    best: one basis over all heads of the layer, of keys before RoPE; a normalised step (see `oja_update`) over all tokens
    of the prompt; and while decoding steps that shrink with what is stored. The preset `ojakv:follow` has keys after RoPE
    in a basis of each head that follows the latest text, and forgets the prompt.

    Attributes:
        eta_pre, eta_dec: step sizes at prefill and while decoding; 0 leaves the basis alone. Under
            `normalize_dec="stored"` eta_dec is the weight of a new token against a stored one.
        normalize, normalize_dec: how these steps are normalised, see `oja_update`. `normalize_dec="stored"` divides the
            step along each direction by the energy of what is stored along it, see `anchored_update`: tokens then weigh
            in whatever order they come (alike at eta_dec=1). The other rules forget: the last refresh moves the
            basis as far as the first.
        learns: what moves the bases of keys at prefill where keys are coded after RoPE: "keys", or "queries_and_keys", as
            calibration does, since what counts of an error of keys is what queries see of it. Decoded tokens leave no
            queries; keys that are coded before RoPE meet queries at all phases, and learn from keys alone.
        top: share of the prompt that the prefill step learns from, k_pre / n; 1 is every token.
        window: queries that vote for a token's importance, w.
        steps: Oja steps taken at prefill on the same tokens.
        estimator: what moves the bases at the same moments and on the same tokens: "oja", the rule above, or another
            name of `estimators.ESTIMATORS`, which begins with the calibrated basis, keeps what it learns beside the
            cache (counted as moments) and weighs all tokens since then alike; `eta_*` of 0 still leave the basis
            alone, and `steps`, `learns` and `normalize*` are not its fields.
        transport: carry stored coefficients over when the basis moves. False reads them in the new basis, which is
            wrong and only there to measure what that costs (on SmolLM2 at rank 0.5, 512 tokens decoded: perplexity
            25.9 instead of 14.6; the full cache has 13.5). Coefficients in 8 bits are quantised anew with every move at
            little loss; in 4 or 2 bits the error grows with every block of decoded tokens: keep the basis at rest
            there (`eta_dec=0`), or give components bits of their own (`bits=4.25`), whose steps stay.
    """

    rope: str = "pre"
    heads: str = "joint"
    eta_pre: float = 1.0
    eta_dec: float = 0.5
    normalize: str = "median"
    normalize_dec: str = "stored"
    learns: str = "queries_and_keys"
    top: float = 1.0
    window: int = 32
    steps: int = 1
    estimator: str = "oja"
    transport: bool = True

    adapts: ClassVar[bool] = True
    calibrated: ClassVar[bool] = True
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {
            "eta_pre": 0.1, "eta_dec": 0.05, "normalize": "none", "normalize_dec": "none", "top": 0.05,
            "recent_of": "prompt", "learns": "keys", "rope": "post", "heads": "per_head",
        },
        "follow": {
            "eta_dec": 1.0, "normalize_dec": "largest", "learns": "keys", "rope": "post", "heads": "per_head",
        },
    }

    def __post_init__(self):
        super().__post_init__()
        allowed = {"normalize": NORMALIZATIONS, "normalize_dec": (*NORMALIZATIONS, STORED), "learns": LEARNS}
        for field, values in allowed.items():
            if getattr(self, field) not in values:
                raise ValueError(f"{field}={getattr(self, field)!r}: allowed are {', '.join(values)}")
        for field in ("eta_pre", "eta_dec"):
            if not (math.isfinite(getattr(self, field)) and getattr(self, field) >= 0):
                raise ValueError(f"{field}={getattr(self, field)!r}: must be a finite number of at least 0")
        for field in ("window", "steps"):
            if not isinstance(getattr(self, field), int) or getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)!r}: must be an int of at least 1")
        if not 0 < self.top <= 1:
            raise ValueError(f"top={self.top!r}: must lie in (0, 1]")
        make_estimator(self.estimator)

    def learner(self, rank: int) -> Estimator | None:
        """The estimator of bases of this rank; None for Oja's rule, which knows no more than the basis."""
        return None if self.estimator == "oja" else make_estimator(self.estimator, size=MARGIN * rank)

    def frame(self, spec, bases, store):
        return Frame(bases.k, bases.v) if store is None else Frame(store.k_basis, store.v_basis)

    def empty(self, layout, bases, size, positions=None):
        store = self.empty_store(layout, bases, size, positions, *of_each_row(layout, bases.k, bases.v))
        if self.estimator == "oja":
            return store
        learned = (
            self.learner(u.shape[-1]).init(u.shape[:2], u.shape[2], u)
            for u in of_each_row(layout, bases.k, bases.v, dtype=jnp.float32)
        )
        own = (getattr(store, field.name) for field in dataclasses.fields(store))
        return LearningStore(*own, *learned)

    def _by_basis(self, layout, x):
        return x.reshape(*x.shape[:2], self.basis_heads(layout.spec), -1)

    def learn(self, layout, bases, store, taps, lengths, weight):
        """Learned of all of a prompt, also of what stays exact or is not selected."""
        if self.eta_pre:
            store = self._fitted(layout, store, taps[0], lengths)
        return self.with_steps_of(layout, bases, store, taps, weight)

    def _fitted(self, layout, store, tap, lengths):
        """The store with bases that have learned of a prompt."""
        q, k, v, weight = self._prompt_tokens(layout, tap, lengths)
        if self.estimator != "oja":
            store = self._learned(store, k, v, weight)
            found = self._learned_bases(store)
        else:
            found = []
            for basis, x, own in ((store.k_basis, k, q), (store.v_basis, v, None)):
                for _ in range(self.steps):
                    basis = oja_update(basis, x, weight, self.eta_pre, self.normalize, own)
                found.append(basis)
        k_basis, v_basis = (u.astype(layout.dtype) for u in found)
        return dataclasses.replace(store, k_basis=k_basis, v_basis=v_basis)

    def _prompt_tokens(self, layout, taps, lengths):
        """Queries `[B, T, N, D]` or None, keys and values `[B, T, J, W]` that the bases learn from at prefill, and their
        weights `[B, T]`."""
        learns_queries = self.learns == "queries_and_keys" and self.rope == "post" and taps.q.shape[-1]
        (k, v), q = (self._by_basis(layout, x) for x in self.sides(taps)), taps.q if learns_queries else None
        if self.top == 1:
            return q, k, v, (jnp.arange(k.shape[1])[None] < lengths[:, None]).astype(jnp.float32)
        index, weight = self._salient(layout, taps, lengths)
        q, k, v = (x if x is None else jnp.take_along_axis(x, index[:, :, None, None], axis=1) for x in (q, k, v))
        return q, k, v, weight

    def _learned(self, store, k, v, weight):
        """The estimators of `store` after tokens `[B, T, J, W]`."""
        new = {}
        for side, x in (("k", k), ("v", v)):
            learner = self.learner(getattr(store, f"{side}_basis").shape[-1])
            known = getattr(store, f"{side}_learned")
            new[f"{side}_learned"] = learner.update(known, x.swapaxes(1, 2), weight[:, None])
        return dataclasses.replace(store, **new)

    def _learned_bases(self, store):
        sides = ((store.k_basis, store.k_learned), (store.v_basis, store.v_learned))
        return [self.learner(u.shape[-1]).basis(learned, u.shape[-1]) for u, learned in sides]

    def _salient(self, layout, taps, lengths):
        """The tokens to which the last queries attend most, summed over all heads (section 5.2)."""
        rule = {"sink_logits": taps.sink_logits, "sliding": layout.window, **layout.spec.logits}
        scores = window_attention(taps.q, taps.k, lengths, self.window, **rule).sum(1)
        most = max(1, share_of(scores.shape[1], self.top))
        counts = jnp.clip(share_of(lengths, self.top), 1, most)
        return most_important(scores, counts, most)

    def adapt(self, layout, bases, store, tokens, weight):
        if self.eta_dec == 0:
            return store
        (one,) = tokens
        k, v = (self._by_basis(layout, x) for x in self.sides(one))
        old = store.k_basis, store.v_basis
        if self.estimator == "oja":
            sides = zip("kv", old, (k, v), strict=True)
            new = [self._stepped(store, side, basis, x, weight) for side, basis, x in sides]
        else:
            store = self._learned(store, k, v, weight)
            new = self._learned_bases(store)
        moved, coefficients, held = {}, {}, store.tokens
        for side, before, after in zip("kv", old, new, strict=True):
            after, steps = after.astype(before.dtype), getattr(store, f"{side}_steps")
            moved[f"{side}_basis"] = after
            coefficients[side] = getattr(held, side)
            if self.transport:
                later = steps and steps.moved(change_of_basis(before, after), moved_rows(held, before, after))
                coefficients[side], moved[f"{side}_steps"] = transport(held, side, before, after, steps, later), later
        return dataclasses.replace(store, tokens=dataclasses.replace(held, **coefficients), **moved)

    def _stepped(self, store, side, basis, x, weight):
        """A basis after a step towards tokens `[B, T, J, W]`, which are not stored yet."""
        if self.normalize_dec != STORED:
            return oja_update(basis, x, weight, self.eta_dec, self.normalize_dec)
        steps = getattr(store, f"{side}_steps")
        held = stored_moment(store.tokens, side, steps)
        return anchored_update(basis, held, x, weight, self.eta_dec, ordered=steps is not None)
