"""OjaKV: calibrated bases that follow the context by Oja's rule (Algorithm 1 of the paper)."""

import dataclasses
import math
from typing import ClassVar

import jax.numpy as jnp

from lowrank_kv_jax.estimators.oja import NORMALIZATIONS, oja_update
from lowrank_kv_jax.importance import most_important, window_attention
from lowrank_kv_jax.method import register
from lowrank_kv_jax.methods.lowrank import Bases, LowRank
from lowrank_kv_jax.segments.coded import transport


@register("ojakv")
@dataclasses.dataclass(frozen=True)
class OjaKV(LowRank):
    """Hybrid storage and two-phase online updates.

    At prefill one Oja step on the `top` share of the prompt's tokens to which its last `window` queries attend most;
    while decoding one step on the tokens that leave the exact window, at every refresh.

    The paper's own settings are `ojakv:eta_pre=0.1,eta_dec=0.05,normalize=none,recent_of=prompt` (table 5). On real
    activations its literal rule destroys the basis, so the default divides the step by the largest eigenvalue of
    Y Y^T (see `oja_update`).

    Attributes:
        eta_pre, eta_dec: step sizes; 0 leaves the basis alone.
        window: queries that vote for a token's importance, w.
        top: share of the prompt that the prefill step learns from, k_pre / n.
        normalize: "spectral", "token" or "none".
        steps: Oja steps taken at prefill on the same tokens.
        transport: carry stored coefficients over when the basis moves. False reads them in the new basis, which is
            wrong and only there to measure what that costs.
    """

    eta_pre: float = 1.0
    eta_dec: float = 0.05
    window: int = 32
    top: float = 0.05
    normalize: str = "spectral"
    steps: int = 1
    transport: bool = True

    adapts: ClassVar[bool] = True
    calibrated: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        if self.normalize not in NORMALIZATIONS:
            raise ValueError(f"normalize={self.normalize!r}: allowed are {', '.join(NORMALIZATIONS)}")
        for field in ("eta_pre", "eta_dec"):
            if not (math.isfinite(getattr(self, field)) and getattr(self, field) >= 0):
                raise ValueError(f"{field}={getattr(self, field)!r}: must be a finite number of at least 0")
        for field in ("window", "steps"):
            if not isinstance(getattr(self, field), int) or getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)!r}: must be an int of at least 1")
        if not 0 < self.top <= 1:
            raise ValueError(f"top={self.top!r}: must lie in (0, 1]")

    def _by_basis(self, layout, x):
        return x.reshape(*x.shape[:2], self.basis_heads(layout.spec), -1)

    def prompt_bases(self, layout, state, taps, lengths):
        scores = window_attention(taps.q, taps.k, lengths, self.window, layout.spec.scale).sum(1)
        most = max(1, math.floor(self.top * layout.prompt))
        counts = jnp.clip(jnp.floor(self.top * lengths).astype(jnp.int32), 1, most)
        index, weight = most_important(scores, counts, most)
        out = []
        for basis, x in ((state.k_basis, taps.k_pre if self.rope == "pre" else taps.k), (state.v_basis, taps.v)):
            salient = jnp.take_along_axis(self._by_basis(layout, x), index[:, :, None, None], axis=1)
            for _ in range(self.steps):
                basis = oja_update(basis, salient, weight, self.eta_pre, self.normalize)
            out.append(basis)
        return Bases(*out)

    def adapt(self, layout, state, k, v, weight):
        if self.eta_dec == 0:
            return state
        moved, coefficients = {}, {}
        for side, x in (("k", k), ("v", v)):
            old = getattr(state, f"{side}_basis")
            new = oja_update(old, self._by_basis(layout, x), weight, self.eta_dec, self.normalize).astype(old.dtype)
            moved[f"{side}_basis"] = new
            kept = getattr(state.coded, side)
            coefficients[side] = transport(kept, state.coded.length, old, new) if self.transport else kept
        return dataclasses.replace(state, coded=dataclasses.replace(state.coded, **coefficients), **moved)
