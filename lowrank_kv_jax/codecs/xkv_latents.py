"""xKV on latent attention (section 5.1, "on the model with MLA"): what it keeps of a group of such layers.

The latents of the layers, taken before their norms, share coefficients; on read they are rebuilt and normed block by
block. The small rotary keys stay as they are, layer by layer.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from lowrank_kv_jax.attention.partial import AttnPartial
from lowrank_kv_jax.attention.spec import LatentSpec, Taps
from lowrank_kv_jax.codecs.component_bits import mean_bits, typical_runs, uniform_bits
from lowrank_kv_jax.codecs.prompt_means import mean_of, without
from lowrank_kv_jax.codecs.refit import refit
from lowrank_kv_jax.estimators.row_steps import fitted_steps
from lowrank_kv_jax.estimators.subspace_iteration import leading_subspace
from lowrank_kv_jax.estimators.svd import second_moment
from lowrank_kv_jax.method import Layout, Place
from lowrank_kv_jax.method.codec import Tokens
from lowrank_kv_jax.pallas_kernels.coefficient_attention import coefficient_attention
from lowrank_kv_jax.segments.coded import fill_tokens
from lowrank_kv_jax.storage.basis import project, reconstruct
from lowrank_kv_jax.storage.block_reads import slice_block
from lowrank_kv_jax.storage.cache_dtype import narrow
from lowrank_kv_jax.storage.cached_tokens import CachedTokens
from lowrank_kv_jax.storage.positions import Runs
from lowrank_kv_jax.storage.quantised import (
    append_tokens,
    empty_tokens,
    padded_to_tiles,
    read_basis,
    store_basis,
    without_padding,
)
from lowrank_kv_jax.storage.state import leaf, state, write_tokens
from lowrank_kv_jax.storage.steps import Steps, plain_steps
from lowrank_kv_jax.storage.water_filled import empty_water_filled


@state
class RotaryKeys:
    """The rotary keys of one layer's coded tokens, after RoPE.

    Attributes:
        k: `[B, 1, S, rotary]`.
    """

    k: jax.Array = leaf("batch", "kv_heads", "tokens", "head_dim", kind="exact")


@state
class LatentStore:
    """The coded tokens of a group of G layers.

    Attributes:
        rotary: of each layer.
        codes: coefficients `[B, 1, S, R]`, shared by all layers.
        length: int32 `[B]`, coded tokens of each row.
        positions: where they stood.
        basis: `[B, 1, G * r, R]`, layer by layer.
        steps: what codes count in where components have bits of their own; None otherwise.
        mean: `[B, 1, G * r]`, which latents are coded without; None: there is none.
    """

    rotary: tuple[RotaryKeys, ...]
    codes: Any = leaf("batch", "kv_heads", "tokens", "rank", kind="coefficients")
    length: jax.Array = leaf("batch", kind="indices")
    positions: Runs
    basis: Any = leaf("batch", "kv_heads", "width", "rank", kind="bases")
    steps: Steps | None
    mean: jax.Array | None = leaf("batch", "kv_heads", "width", kind="bases")


class RebuiltKeys:
    """Keys [rotary | normed latent] of one layer, rebuilt block by block; read by the attention ops."""

    def __init__(
        self, rotary: jax.Array, codes: Any, basis: jax.Array, latent: LatentSpec, steps: Steps | None,
        mean: jax.Array | None = None,
    ):
        self.rotary, self.codes, self.steps = rotary, codes, steps
        self.basis, self.mean, self.latent = basis, mean, latent
        self.shape = (*rotary.shape[:3], rotary.shape[3] + latent.rank)

    def read_block(self, start: jax.Array | int, size: int) -> jax.Array:
        """Tokens `start` to `start + size`, float32 `[B, 1, size, D]`."""
        codes, rotary = (slice_block(x, start, size).astype(jnp.float32) for x in (self.codes, self.rotary))
        latents = reconstruct(self.basis, codes if self.steps is None else self.steps.widen(codes), 1)
        latents = latents if self.mean is None else latents + self.mean.astype(jnp.float32)[:, :, None]
        return jnp.concatenate([rotary, self.latent.normalise(latents)], axis=-1)


def empty(
    layout: Layout, layers: int, rank: int, size: int, bits: float | None, basis_dtype: str, centred: bool = False
) -> LatentStore:
    """An empty store with room for `size` tokens, coefficients in `bits` bits or the cache's dtype."""
    spec, dtype = layout.spec, jnp.dtype(layout.dtype)
    assert spec.latent is not None
    rotary = RotaryKeys(jnp.zeros((layout.batch, 1, size, spec.head_dim - spec.latent.rank), dtype))
    none, gaps = jnp.zeros((layout.batch,), jnp.int32), jnp.zeros((layout.batch, 2), jnp.int32)
    if (mean := mean_bits(bits)) is None:
        codes, steps = empty_tokens((layout.batch, 1, size, rank), uniform_bits(bits), dtype), None
    else:
        codes = empty_water_filled(layout.batch, 1, size, typical_runs(rank, mean))
        rank = codes.shape[-1]
        steps = plain_steps((layout.batch, 1, rank), dtype)
    basis = store_basis(jnp.zeros((layout.batch, 1, layers * spec.latent.rank, rank)), basis_dtype)
    mean = jnp.zeros((layout.batch, 1, layers * spec.latent.rank), dtype) if centred else None
    return LatentStore((rotary,) * layers, codes, none, Runs(gaps, gaps), basis, steps, mean)


def learn(
    layout: Layout, store: LatentStore, taps: tuple[Taps, ...], weight: jax.Array, basis_dtype: str
) -> LatentStore:
    """Fit one basis to the group's latents."""
    latents = _latents(layout, [tap.k_pre for tap in taps])
    mean = None if store.mean is None else mean_of(latents, weight, store.mean.dtype)
    latents = without(latents, mean)
    basis = leading_subspace(second_moment(latents, weight), store.codes.shape[-1])
    basis, steps = store_basis(basis, basis_dtype), None
    if store.steps is not None:
        found = project(read_basis(basis), latents.astype(jnp.float32))
        steps = fitted_steps(found, weight, store.codes.runs, layout.dtype)
    return dataclasses.replace(store, basis=basis, steps=steps, mean=mean)


def fill(
    layout: Layout, store: LatentStore, tokens: tuple[Tokens, ...], counts: jax.Array, positions: Runs
) -> LatentStore:
    """Keep the coefficients of the tokens' latents, and their rotary keys."""
    size, rotary_dim = store.codes.shape[2], _rotary_dim(layout)

    def room(x: jax.Array) -> jax.Array:  # tokens [B, 1, S, .] to the size of the buffers
        return jnp.pad(x[:, :, :size], ((0, 0), (0, 0), (0, max(size - x.shape[2], 0)), (0, 0)))

    codes = project(read_basis(store.basis), _coded(layout, store, tokens))
    codes = codes if store.steps is None else store.steps.count(codes)
    rotary = tuple(
        RotaryKeys(narrow(room(one.k[..., :rotary_dim].swapaxes(1, 2)), own.k.dtype))
        for one, own in zip(tokens, store.rotary, strict=True)
    )
    filled = fill_tokens(store.codes, codes, counts)
    return dataclasses.replace(store, rotary=rotary, codes=filled, length=counts, positions=positions)


def take_more(
    layout: Layout, store: LatentStore, tokens: tuple[Tokens, ...], counts: jax.Array, basis_dtype: str, fits: bool
) -> LatentStore:
    """A further chunk of the prompt behind what is stored, in a basis that is fitted to both where it `fits`."""
    weight = (jnp.arange(tokens[0].k.shape[1])[None] < counts[:, None]).astype(jnp.float32)
    x = _coded(layout, store, tokens) * weight[:, :, None, None]
    size = store.codes.shape[2]
    store = dataclasses.replace(store, codes=padded_to_tiles(store.codes))
    if fits:
        rank = store.basis.shape[-1]
        codes, basis, steps = refit(
            layout, store, "codes", store.basis, store.steps, x, weight, second_moment(x),
            lambda moment: store_basis(leading_subspace(moment, rank), basis_dtype),
        )
        store = dataclasses.replace(store, codes=codes, basis=basis, steps=steps)
    new = project(read_basis(store.basis), x)
    new = new if store.steps is None else store.steps.count(new)
    codes = without_padding(append_tokens(store.codes, new[:, :, :size], store.length, counts), size)
    rotary_dim = _rotary_dim(layout)
    rotary = tuple(
        RotaryKeys(write_tokens(own.k, one.k[:, :size, ..., :rotary_dim].swapaxes(1, 2), store.length, counts))
        for one, own in zip(tokens, store.rotary, strict=True)
    )
    return dataclasses.replace(store, rotary=rotary, codes=codes, length=store.length + counts)


def attend(layout: Layout, store: LatentStore, q: jax.Array, positions: jax.Array, place: Place) -> AttnPartial:
    """Attention of absorbed queries `[B, T, N, D]` over the coded tokens; the rebuilt keys are the values."""
    latent = layout.spec.latent
    assert latent is not None
    begin = place.index * latent.rank
    basis = read_basis(store.basis, begin, latent.rank)
    mean = None if store.mean is None else store.mean[..., begin : begin + latent.rank]
    keys: Any = RebuiltKeys(store.rotary[place.index].k, store.codes, basis, latent, store.steps, mean)
    tokens = CachedTokens(keys, keys, store.length, store.positions)
    return coefficient_attention(
        q, tokens, **layout.spec.logits, q_positions=positions, causal=False, window=place.window
    )


def _rotary_dim(layout: Layout) -> int:
    assert layout.spec.latent is not None
    return layout.spec.head_dim - layout.spec.latent.rank


def _coded(layout: Layout, store: LatentStore, tokens: tuple[Tokens, ...]) -> jax.Array:
    """What is coded of tokens, float32 `[B, S, 1, G * r]`."""
    return without(_latents(layout, [one.k_pre for one in tokens]).astype(jnp.float32), store.mean)


def _latents(layout: Layout, keys: list[jax.Array]) -> jax.Array:
    """The layers' latents before their norms, side by side `[B, S, 1, G * r]`."""
    return jnp.concatenate([k[..., _rotary_dim(layout) :] for k in keys], axis=-1)
