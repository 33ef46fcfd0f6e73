"""The op that prefill calls; the platform decides the backend."""

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jaxtyping import Float

from lowrank_kv_jax.attention.partial import AttnPartial
from lowrank_kv_jax.pallas_kernels import dispatch
from lowrank_kv_jax.pallas_kernels.over_mesh import QUERIES, cut, local
from lowrank_kv_jax.storage.block_reads import BLOCK

KERNELS = {"triton": "gpu_cudnn", "mosaic_gpu": "gpu_cudnn", "tpu": "tpu_splash"}
"""Modules of this folder that hold the op, by backend: flash attention of cuDNN and of JAX, none of our own."""

PARTIALS = {"triton": "gpu_triton", "mosaic_gpu": "gpu_triton", "tpu": "tpu_splash"}
"""The same of the op with its log-sum-exp."""


def causal_attention(
    q: Float[jax.Array, "B T N D"], k: Float[jax.Array, "B T K D"], v: Float[jax.Array, "B T K Dv"],
    sink_logits: Float[jax.Array, " N"] | None = None, *, scale: float, window: int | None, cap: float | None = None,
    backend: str | None = None,
) -> Float[jax.Array, "B T N Dv"]:
    """Exact causal attention of a prompt with itself (prefill).

    Args:
        q: `[B, T, N, D]`.
        k: `[B, T, K, D]`.
        v: `[B, T, K, Dv]`.
        sink_logits: float32 `[N]`, a logit of each query head without a value, or None (not by cuDNN); see
            `attention.sink_logits`.
        scale: factor on the logits.
        window: sliding window in tokens, or None.
        cap: soft cap of the logits (XLA only); see `attention.blockwise.logits_of`.
        backend: one of `storage.backend.BACKENDS` instead of the platform's; on a GPU either of its two means cuDNN.

    Returns:
        `[B, T, N, Dv]` in the dtype of `q`. Rows are padded on the right, so no valid query sees a pad.

    Raises:
        ValueError: an unknown backend. A case that the backend's kernel does not cover runs on XLA, with a warning.
    """
    arrays = {"q": q, "k": k, "v": v, "sink_logits": sink_logits}
    attend = functools.partial(_implementation, op="causal_attention", scale=scale, window=window)

    def specs():
        of_heads = {name: cut(x, QUERIES) for name, x in arrays.items() if name != "sink_logits"}
        return of_heads | ({} if sink_logits is None else {"sink_logits": cut(sink_logits, ("kv_heads",))})

    # cuDNN's is cut by JAX
    kernels = {name: functools.partial(attend, module, **arrays) for name, module in KERNELS.items()}
    kernels["tpu"] = local(functools.partial(attend, KERNELS["tpu"]), specs, arrays, lse=False)
    reference = functools.partial(attend, "reference", cap=cap, **arrays)
    return _run("causal_attention", kernels, reference, q.shape[1], cap, backend)


def causal_partial(
    q: Float[jax.Array, "B T N D"], k: Float[jax.Array, "B T K D"], v: Float[jax.Array, "B T K Dv"], *, scale: float,
    window: int | None, cap: float | None = None, backend: str | None = None,
) -> AttnPartial:
    """The same attention with its log-sum-exp, to be merged with that over other tokens.

    Args, Raises: as for `causal_attention`.

    Returns:
        Partial, float32: out `[B, T, N, Dv]`, by a kernel of an accelerator rounded to the dtype of `q` before.
    """
    arrays = {"q": q, "k": k, "v": v}
    attend = functools.partial(_implementation, op="causal_partial", scale=scale, window=window)

    def specs():
        return {name: cut(x, QUERIES) for name, x in arrays.items()}

    kernels = {name: local(functools.partial(attend, module), specs, arrays) for name, module in PARTIALS.items()}
    return _run("causal_partial", kernels, functools.partial(attend, "reference", cap=cap, **arrays), q.shape[1], cap,
                backend)


def _run(
    op: str, kernels: Mapping[str, Callable[..., Any]], reference: Callable[[], Any], tokens: int, cap: float | None,
    backend: str | None,
) -> Any:
    if tokens <= BLOCK:  # one block of XLA's: nothing that grows, and nothing for a kernel to save
        dispatch.choose(backend)
        return reference()
    return dispatch.run(
        op, backend, kernels if cap is None else dispatch.without_kernels(kernels, "logits that are capped"), reference)


def _implementation(module: str, op: str, **arguments: Any) -> Any:
    """Call an op in a module of this folder, imported when it is needed: Pallas is not where XLA is enough."""
    return getattr(importlib.import_module(f"{__package__}.{module}"), op)(**arguments)
