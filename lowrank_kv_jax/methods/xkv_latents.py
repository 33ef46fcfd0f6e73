"""xKV on latent attention (section 5.1, "on the model with MLA"): what it keeps of a group of such layers.

The latents of the layers, taken before their norms, share coefficients; on read they are rebuilt and normed block by
block. The small rotary keys stay as they are, layer by layer.
"""

from typing import Any

import jax
import jax.numpy as jnp

from lowrank_kv_jax.cache_dtype import narrow
from lowrank_kv_jax.codecs.basis import project, reconstruct
from lowrank_kv_jax.codecs.quantised import read_basis, store_basis, store_tokens
from lowrank_kv_jax.estimators.subspace_iteration import leading_subspace
from lowrank_kv_jax.estimators.svd import second_moment
from lowrank_kv_jax.method import Layout, Place
from lowrank_kv_jax.pallas_kernels.blockwise import slice_block
from lowrank_kv_jax.pallas_kernels.coefficient_attention import CachedTokens, coefficient_attention
from lowrank_kv_jax.partial import AttnPartial
from lowrank_kv_jax.positions import Runs
from lowrank_kv_jax.segments import exact as exact_tokens
from lowrank_kv_jax.spec import LatentSpec, Taps
from lowrank_kv_jax.state import leaf, state


@state
class RotaryKeys:
    """The rotary keys of one layer's coded tokens, after RoPE.

    Attributes:
        k: `[B, 1, S, rotary]`.
    """

    k: jax.Array = leaf("batch", "kv_heads", "tokens", "head_dim", kind="exact")


@state
class LatentState:
    """The cache of a group of G layers.

    Attributes:
        exact: of each layer, its sinks, the prompt's last tokens and those appended since.
        rotary: of each layer's other tokens.
        codes: their coefficients `[B, 1, S, R]`, shared by all layers.
        length: int32 `[B]`, coded tokens of each row.
        positions: where they stood.
        basis: `[B, 1, G * r, R]`, layer by layer.
    """

    exact: tuple[exact_tokens.Exact, ...]
    rotary: tuple[RotaryKeys, ...]
    codes: Any = leaf("batch", "kv_heads", "tokens", "rank", kind="coefficients")
    length: jax.Array = leaf("batch", kind="indices")
    positions: Runs
    basis: Any = leaf("batch", "kv_heads", "width", "rank", kind="bases")


class RebuiltKeys:
    """Keys [rotary | normed latent] of one layer, rebuilt block by block; read by the attention ops."""

    def __init__(self, rotary: jax.Array, codes: Any, basis: jax.Array, latent: LatentSpec):
        self.rotary, self.codes, self.basis, self.latent = rotary, codes, basis, latent
        self.shape = (*rotary.shape[:3], rotary.shape[3] + latent.rank)

    def read_block(self, start: jax.Array | int, size: int) -> jax.Array:
        """Tokens `start` to `start + size`, float32 `[B, 1, size, D]`."""
        codes, rotary = (slice_block(x, start, size).astype(jnp.float32) for x in (self.codes, self.rotary))
        latents = reconstruct(self.basis, codes, 1)
        return jnp.concatenate([rotary, self.latent.normalise(latents)], axis=-1)


def empty(method: Any, layout: Layout, layers: int, rank: int) -> LatentState:
    """An empty state of a group; `method` says how many tokens stay exact, and how codes and basis are stored."""
    spec, dtype, held = layout.spec, jnp.dtype(layout.dtype), method.sinks + method.recent
    size = max(layout.prompt - held, 1)
    exact = exact_tokens.empty_exact(
        layout.batch, 1, min(held, layout.prompt) + max(layout.capacity - layout.prompt, layout.block), spec.head_dim,
        dtype, gaps=(method.sinks, held), value_dim=0,
    )
    rotary = RotaryKeys(jnp.zeros((layout.batch, 1, size, spec.head_dim - spec.latent.rank), dtype))
    none, gaps = jnp.zeros((layout.batch,), jnp.int32), jnp.zeros((layout.batch, 2), jnp.int32)
    codes = store_tokens(jnp.zeros((layout.batch, 1, size, rank)), method.bits, dtype)
    basis = jnp.zeros((layout.batch, 1, layers * spec.latent.rank, rank))
    basis = _store(method, layout, basis)
    return LatentState((exact,) * layers, (rotary,) * layers, codes, none, Runs(gaps, gaps), basis)


def compress(method: Any, layout: Layout, state: LatentState, taps: tuple[Taps, ...], lengths: jax.Array) -> LatentState:
    """Fit one basis to the group's latents and keep their coefficients."""
    sinks, recent, size = method.sinks, method.recent, state.codes.shape[2]
    rotary_dim = layout.spec.head_dim - layout.spec.latent.rank
    slots = jnp.arange(layout.prompt)[None]
    weight = ((slots >= sinks) & (slots < lengths[:, None] - recent)).astype(jnp.float32)
    latents = jnp.concatenate([tap.k_pre[..., rotary_dim:] for tap in taps], axis=-1)
    basis = _store(method, layout, leading_subspace(second_moment(latents, weight), state.codes.shape[-1]))
    coded = slice(sinks, max(layout.prompt - recent, sinks))

    def fill(x: jax.Array) -> jax.Array:  # tokens [B, 1, S, .] to the size of the buffers
        return jnp.pad(x[:, :, :size], ((0, 0), (0, 0), (0, max(size - x.shape[2], 0)), (0, 0)))

    codes = fill(project(read_basis(basis), latents[:, coded].astype(jnp.float32) * weight[:, coded, None, None]))
    rotary = tuple(
        RotaryKeys(narrow(fill(tap.k[:, coded, :, :rotary_dim].swapaxes(1, 2)), state.rotary[0].k.dtype)) for tap in taps
    )
    exact = tuple(
        exact_tokens.hold_prompt(segment, tap.k, tap.v, lengths, sinks, recent)
        for segment, tap in zip(state.exact, taps, strict=True)
    )
    counts = jnp.maximum(lengths - sinks - recent, 0)
    zero = jnp.zeros_like(counts)
    positions = Runs(jnp.stack([zero, counts], axis=1), jnp.stack([zero + sinks, zero + recent], axis=1))
    codes = store_tokens(codes, method.bits, jnp.dtype(layout.dtype))
    return LatentState(exact, rotary, codes, counts, positions, basis)


def attend_coded(
    layout: Layout, state: LatentState, q: jax.Array, positions: jax.Array, place: Place
) -> AttnPartial:
    """Attention of absorbed queries `[B, T, N, D]` over the coded tokens; the rebuilt keys are the values."""
    latent = layout.spec.latent
    begin = place.index * latent.rank
    basis = read_basis(state.basis, begin, begin + latent.rank)
    keys: Any = RebuiltKeys(state.rotary[place.index].k, state.codes, basis, latent)
    tokens = CachedTokens(keys, keys, state.length, state.positions)
    return coefficient_attention(
        q, tokens, scale=layout.spec.scale, q_positions=positions, causal=False, window=place.window
    )


def _store(method: Any, layout: Layout, basis: jax.Array):
    return store_basis(basis, method.basis_dtype or layout.dtype)
