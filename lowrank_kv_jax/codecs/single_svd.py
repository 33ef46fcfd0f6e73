"""The principal subspace of the prompt itself: per-layer SVD at prefill."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from lowrank_kv_jax.codecs.component_bits import stored_ranks
from lowrank_kv_jax.codecs.frame import Frame
from lowrank_kv_jax.codecs.lowrank import SIDES, of_each_row
from lowrank_kv_jax.codecs.principal import Principal
from lowrank_kv_jax.codecs.refit import refit
from lowrank_kv_jax.estimators.svd import principal_subspace, second_moment
from lowrank_kv_jax.method import register


@register("single-svd")
@dataclasses.dataclass(frozen=True)
class SingleSVD(Principal):
    """SVD of each prompt, layer by layer (the Single SVD baseline of xKV; the oracle for online rules).

    The right singular vectors are taken from the second moment of the tokens that will be coded. As in xKV what is
    decoded stays exact; unlike there, so do the sinks and the prompt's last tokens (`single-svd:paper` keeps none).
    """

    rank: int | float | None = 0.25
    rope: str = "pre"
    heads: str = "joint"
    decoded: str = "exact"

    adapts: ClassVar[bool] = True
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": {"sinks": 0, "recent": 0}}

    def frame(self, spec, bases, store):
        if store is not None:
            return Frame(store.k_basis, store.v_basis)
        ranks = stored_ranks(self.profile(spec, bases), self.ranks(spec))
        eyes = (jnp.eye(self.width(spec), rank, dtype=jnp.float32) for rank in ranks)
        return Frame(*(jnp.broadcast_to(eye, (self.basis_heads(spec), *eye.shape)) for eye in eyes))

    def empty(self, layout, bases, size, positions=None):
        start = self.frame(layout.spec, bases, None)
        return self.empty_store(layout, bases, size, positions, *of_each_row(layout, start.k, start.v))

    def learn(self, layout, bases, store, taps, lengths, weight):
        (tap,), found = taps, []
        for x, basis in zip(self.sides(tap), (store.k_basis, store.v_basis), strict=True):
            x = x.reshape(*x.shape[:2], self.basis_heads(layout.spec), -1)
            found.append(principal_subspace(second_moment(x, weight), basis.shape[-1]).astype(layout.dtype))
        store = dataclasses.replace(store, k_basis=found[0], v_basis=found[1])
        return self.with_steps_of(layout, bases, store, taps, weight)

    def relearn(self, layout, bases, store, tokens, weight):
        """A basis for the stored coefficients, which are carried over, and the new tokens."""
        (one,), held, new = tokens, store.tokens, {}
        for side, x in zip(SIDES, self.sides(one), strict=True):
            x = x.reshape(*x.shape[:2], self.basis_heads(layout.spec), -1).astype(jnp.float32) * weight[:, :, None, None]
            basis, steps = (getattr(store, f"{side}_{what}") for what in ("basis", "steps"))

            def fit(moment: jax.Array, basis: jax.Array = basis) -> jax.Array:
                return principal_subspace(moment, basis.shape[-1]).astype(basis.dtype)

            codes, new[f"{side}_basis"], new[f"{side}_steps"] = refit(
                layout, held, side, basis, steps, x, weight, second_moment(x), fit)
            held = dataclasses.replace(held, **{side: codes})
        return dataclasses.replace(store, tokens=held, **new)
