"""The principal subspace of the prompt itself: per-layer SVD at prefill."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from lowrank_kv_jax.attention.spec import Taps
from lowrank_kv_jax.codecs.component_bits import stored_ranks
from lowrank_kv_jax.codecs.frame import Frame
from lowrank_kv_jax.codecs.lowrank import SIDES, LowRankStore, of_each_row
from lowrank_kv_jax.codecs.principal import Principal
from lowrank_kv_jax.codecs.prompt_means import mean_of, of_heads, without
from lowrank_kv_jax.codecs.refit import refit
from lowrank_kv_jax.estimators.svd import principal_subspace, second_moment
from lowrank_kv_jax.method import Layout, register
from lowrank_kv_jax.method.codec import Tokens
from lowrank_kv_jax.storage.state import leaf, state


@state
class CentredStore(LowRankStore):
    """Coefficients, those of keys around the mean of each row's prompt, `[B, J, W]`."""

    k_mean: jax.Array = leaf("batch", "kv_heads", "width", kind="bases")


@register("single-svd")
@dataclasses.dataclass(frozen=True)
class SingleSVD(Principal):
    """SVD of each prompt, layer by layer (the Single SVD baseline of xKV; the oracle for online rules).

    The right singular vectors are taken from the second moment of the tokens that will be coded. As in xKV what is
    decoded stays exact; unlike there, so do the sinks and the prompt's last tokens (`single-svd:paper` keeps none).

    Attributes:
        centred: code keys around the mean of those of the prompt that are coded, which is stored beside the bases. A bias
            (Qwen2) then costs no direction. Values keep their mean: around it they were coded worse (docs/xkv.md).
    """

    rank: int | float | None = 0.25
    rope: str = "pre"
    heads: str = "joint"
    decoded: str = "exact"
    centred: bool = False

    adapts: ClassVar[bool] = True
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": {"sinks": 0, "recent": 0}}

    def frame(self, spec, bases, store):
        if store is not None:
            mean = of_heads(store.k_mean, spec.kv_heads) if self.centred else None
            return Frame(store.k_basis, store.v_basis, mean)
        ranks = stored_ranks(self.profile(spec, bases), self.ranks(spec))
        eyes = (jnp.eye(self.width(spec), rank, dtype=jnp.float32) for rank in ranks)
        return Frame(*(jnp.broadcast_to(eye, (self.basis_heads(spec), *eye.shape)) for eye in eyes))

    def empty(self, layout, bases, size, positions=None):
        start = self.frame(layout.spec, bases, None)
        store = self.empty_store(layout, bases, size, positions, *of_each_row(layout, start.k, start.v))
        if not self.centred:
            return store
        heads = self.basis_heads(layout.spec)
        mean = jnp.zeros((layout.batch, heads, self.width(layout.spec)), layout.dtype)
        return CentredStore(*(getattr(store, field.name) for field in dataclasses.fields(store)), mean)

    def learn(self, layout, bases, store, taps, lengths, weight):
        (tap,), found = taps, {}
        for side, x in zip(SIDES, self._by_basis(layout, tap), strict=True):
            mean = mean_of(x, weight, layout.dtype) if self.centred and side == "k" else None
            rank = getattr(store, f"{side}_basis").shape[-1]
            found[side] = mean, principal_subspace(second_moment(without(x, mean), weight), rank).astype(layout.dtype)
        store = dataclasses.replace(store, k_basis=found["k"][1], v_basis=found["v"][1])
        if self.centred:
            store = dataclasses.replace(store, k_mean=found["k"][0])
        return self.with_steps_of(layout, bases, store, taps, weight)

    def relearn(self, layout, bases, store, tokens, weight):
        """A basis for the stored coefficients, which are carried over, and the new tokens; the mean stays."""
        (one,), held, new = tokens, store.tokens, {}
        for side, x in zip(SIDES, self._by_basis(layout, one), strict=True):
            x = without(x, store.k_mean if self.centred and side == "k" else None)
            x = x.astype(jnp.float32) * weight[:, :, None, None]
            basis, steps = (getattr(store, f"{side}_{what}") for what in ("basis", "steps"))

            def fit(moment: jax.Array, basis: jax.Array = basis) -> jax.Array:
                return principal_subspace(moment, basis.shape[-1]).astype(basis.dtype)

            codes, new[f"{side}_basis"], new[f"{side}_steps"] = refit(
                layout, held, side, basis, steps, x, weight, second_moment(x), fit)
            held = dataclasses.replace(held, **{side: codes})
        return dataclasses.replace(store, tokens=held, **new)

    def _by_basis(self, layout: Layout, tokens: Tokens | Taps) -> tuple[jax.Array, ...]:
        """Keys as they are coded and values `[B, T, J, W]`."""
        return tuple(x.reshape(*x.shape[:2], self.basis_heads(layout.spec), -1) for x in self.sides(tokens))
