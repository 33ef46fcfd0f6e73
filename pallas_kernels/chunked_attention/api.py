"""The op that the core calls; the platform decides the backend."""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Float, Int

from lowrank_kv_jax.attention.partial import AttnPartial, merge
from lowrank_kv_jax.attention.rope import RopeSpec
from lowrank_kv_jax.pallas_kernels import dispatch
from lowrank_kv_jax.pallas_kernels.chunked_attention import by_kernel, reference
from lowrank_kv_jax.pallas_kernels.coefficient_attention import api
from lowrank_kv_jax.pallas_kernels.over_mesh import (
    POSITIONS,
    QUERIES,
    cut,
    cut_state,
    cut_tokens,
    devices_of_heads,
    local,
)
from lowrank_kv_jax.storage.cached_tokens import Beside, CachedTokens
from lowrank_kv_jax.storage.chunk_bases import ChunkBases
from lowrank_kv_jax.storage.over_tokens import mesh_here

BEFORE_ROPE = ("tpu",)
"""Of `api.KERNELS` those that have a module in this folder, for keys that were coded before RoPE."""
FOR_ALL = "gpu_triton"
"""The one that has a module here for all chunks, and other tokens beside."""


def chunked_attention(
    q: Float[jax.Array, "B T N D"], tokens: CachedTokens, owner: Int[jax.Array, "B P"], k_bases: ChunkBases,
    v_bases: ChunkBases, *, page: int, rope: RopeSpec | None, kv_heads: int, scale: float,
    q_positions: Int[jax.Array, "B T"], window: int | None, cap: float | None = None, beside: Beside | None = None,
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
        beside: other tokens to attend to.
        scale, q_positions, window, cap, backend: as in `coefficient_attention`.

    Returns:
        Partial in head space: the exact softmax over the approximated logits, applied to the approximated values.
    """
    attend: dict[str, Any] = dict(page=page, rope=rope, scale=scale, window=window)
    arrays = {"q": q, "tokens": tokens, "owner": owner, "k_bases": k_bases, "v_bases": v_bases,
              "q_positions": q_positions}

    def specs():
        return {"q": cut(q, QUERIES), "tokens": cut_tokens(tokens), "owner": cut(owner, POSITIONS),
                "k_bases": _cut_bases(k_bases), "v_bases": _cut_bases(v_bases),
                "q_positions": cut(q_positions, POSITIONS)}

    def joined(part: AttnPartial) -> AttnPartial:
        if beside is None:
            return part
        return merge([api.attend_to(beside, scale=scale, cap=cap, backend=backend), part], kv_heads)

    def run(module: str, **given: Any) -> AttnPartial:
        given |= attend | {"kv_heads": kv_heads // devices_of_heads()}
        if module == FOR_ALL or rope is not None and module in BEFORE_ROPE:
            return importlib.import_module(f"{__package__}.{module}").chunked_attention(**given)
        return by_kernel.chunked_attention(importlib.import_module(f"{api.__package__}.{module}"), **given)

    def kernel(module: str) -> Callable[[bool], AttnPartial]:
        mesh = mesh_here()
        if module == FOR_ALL and (mesh is None or mesh.size == 1):
            return lambda interpret: run(module, **arrays, beside=beside, interpret=interpret)
        on_device = local(functools.partial(run, module), specs, arrays)
        return lambda interpret: joined(on_device(interpret))

    kernels = {name: kernel(module) for name, module in api.KERNELS.items()}
    if cap is not None:
        kernels = dispatch.without_kernels(kernels, "logits that are capped")
    return dispatch.run(
        "chunked_attention", backend, kernels,
        lambda: joined(reference.chunked_attention(**attend, **arrays, kv_heads=kv_heads, cap=cap)))


def _cut_bases(bases: ChunkBases) -> Any:
    """How bases of chunks lie: by heads, or by the channels of heads that share one."""
    if bases.heads is not None:
        raise dispatch.Unsupported("bases whose columns are of one head each, over several devices")
    if bases.codes.shape[2] > 1:
        return cut_state(bases)
    channels = 4 if bases.by_rows else 3
    codes = cut(bases.codes, tuple("batch" if i == 0 else "kv_heads" if i == channels else None for i in range(5)))
    scales = bases.scales if bases.scales is None else cut(bases.scales, ("batch", None, None, None, None))
    return dataclasses.replace(bases, codes=codes, scales=scales)
