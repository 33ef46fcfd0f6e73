"""The op that the core calls; the platform decides the backend."""

import functools
import importlib
from typing import Any

import jax
from jaxtyping import Float, Int

from lowrank_kv_jax.attention.partial import AttnPartial
from lowrank_kv_jax.attention.rope import RopeSpec
from lowrank_kv_jax.pallas_kernels import dispatch
from lowrank_kv_jax.pallas_kernels.chunked_attention import by_kernel, reference
from lowrank_kv_jax.pallas_kernels.coefficient_attention import api
from lowrank_kv_jax.storage.cached_tokens import CachedTokens
from lowrank_kv_jax.storage.chunk_bases import ChunkBases


def chunked_attention(
    q: Float[jax.Array, "B T N D"], tokens: CachedTokens, owner: Int[jax.Array, "B P"], k_bases: ChunkBases,
    v_bases: ChunkBases, *, page: int, rope: RopeSpec | None, kv_heads: int, scale: float,
    q_positions: Int[jax.Array, "B T"], window: int | None, cap: float | None = None,
    backend: str | None = None,
) -> AttnPartial:
    """One softmax over all chunks (Online Subspace Projection, section 6), in one pass.

    Args:
        q: queries after RoPE `[B, T, N, D]`; all tokens lie before them.
        tokens: coefficients, keys `[B, J, S, Rk]` and values `[B, J, S, Rv]`, S a multiple of `page`.
        owner: int `[B, P]`, P = S / `page`, the basis of each page of tokens, never falling from page to page.
        k_bases, v_bases: the bases.
        page: tokens that share a basis; a chunk is a run of pages.
        rope: rotation of keys that were coded before RoPE, rebuilt on read; None attends in coefficient space.
        kv_heads: K.
        scale, q_positions, window, cap, backend: as in `coefficient_attention`.

    Returns:
        Partial in head space: the exact softmax over the approximated logits, applied to the approximated values.
    """
    attend: dict[str, Any] = dict(
        q=q, tokens=tokens, owner=owner, k_bases=k_bases, v_bases=v_bases, page=page, rope=rope, kv_heads=kv_heads,
        scale=scale, q_positions=q_positions, window=window,
    )

    def run(module: str, interpret: bool) -> AttnPartial:
        kernel = importlib.import_module(f"{api.__package__}.{module}")
        return by_kernel.chunked_attention(kernel, **attend, interpret=interpret)

    kernels = {name: functools.partial(run, module) for name, module in api.KERNELS.items()}
    if cap is not None:
        kernels = dispatch.without_kernels(kernels, "logits that are capped")
    return dispatch.run("chunked_attention", backend, kernels, lambda: reference.chunked_attention(**attend, cap=cap))
