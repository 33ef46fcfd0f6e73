"""The attention ops that the core calls; the platform decides the backend."""

import functools
import importlib
from typing import Any

import jax
from jaxtyping import Float, Int

from lowrank_kv_jax.attention.partial import AttnPartial, merge
from lowrank_kv_jax.pallas_kernels import dispatch
from lowrank_kv_jax.pallas_kernels.coefficient_attention import by_kernel, reference
from lowrank_kv_jax.pallas_kernels.over_mesh import POSITIONS, QUERIES, cut, cut_beside, cut_tokens, local
from lowrank_kv_jax.storage.cached_tokens import Beside, CachedTokens

KERNELS = {"triton": "gpu_triton", "mosaic_gpu": "gpu_mosaic", "tpu": "tpu"}
"""Modules of this folder whose `attend_slots` is the op's, by backend; `reads_beside` says which others it reads."""


def coefficient_attention(
    q: Float[jax.Array, "B T N Dk"], tokens: CachedTokens, *, scale: float, q_positions: Int[jax.Array, "B T"],
    causal: bool, window: int | None, cap: float | None = None, beside: Beside | None = None,
    backend: str | None = None,
) -> AttnPartial:
    """Attention in the space in which the tokens are stored.

    Args:
        q: `[B, T, N, Dk]`, folded into the basis of the keys where there is one.
        tokens: the segment.
        scale: 1 / sqrt(head_dim), whatever the rank.
        q_positions: int32 `[B, T]`.
        causal: whether tokens of the segment may lie after a query (the block being appended).
        window: sliding window in tokens, or None.
        cap: soft cap of the logits (XLA only); see `attention.blockwise.logits_of`.
        beside: other tokens to attend to, whose values lie in the same space; on a GPU the same programs read them.
        backend: one of `storage.backend.BACKENDS` instead of the platform's; interpreted where its hardware is not there.

    Returns:
        Partial whose out is in the space of the values, `[B, T, N, Dv]` (equations of section 3.2 of OjaKV).

    Raises:
        ValueError: an unknown backend. A case that the backend's kernel does not cover runs on XLA, with a warning.
    """
    options: dict[str, Any] = dict(scale=scale, causal=causal, window=window)
    arrays = {"q": q, "tokens": tokens, "q_positions": q_positions}

    def specs():
        at = cut(q_positions, POSITIONS)
        found = {"q": cut(q, QUERIES), "tokens": cut_tokens(tokens, packed=True), "q_positions": at}
        return found if beside is None else found | {"beside": cut_beside(beside)}

    def on_xla() -> AttnPartial:
        part = reference.coefficient_attention(**options, **arrays, cap=cap)
        return part if beside is None else merge([attend_to(beside, scale=scale, cap=cap, backend=backend), part])

    attend = functools.partial(_by_kernel, **options)
    given = arrays | {"beside": beside}
    kernels = {name: local(functools.partial(attend, module), specs, given) for name, module in KERNELS.items()}
    if cap is not None:
        kernels = dispatch.without_kernels(kernels, "logits that are capped")
    return dispatch.run("coefficient_attention", backend, kernels, on_xla)


def attend_to(
    asked: Beside, *, scale: float, cap: float | None = None, beside: Beside | None = None, backend: str | None = None
) -> AttnPartial:
    """`coefficient_attention` over the tokens of a `Beside`."""
    return coefficient_attention(
        asked.q, asked.tokens, scale=scale, q_positions=asked.q_positions, causal=asked.causal, window=asked.window,
        cap=cap, beside=beside, backend=backend,
    )


def _by_kernel(module: str, **arguments: Any) -> AttnPartial:
    """The op by a module of this folder, imported when it is needed: Pallas is not where XLA is enough."""
    return by_kernel.coefficient_attention(importlib.import_module(f"{__package__}.{module}"), **arguments)
