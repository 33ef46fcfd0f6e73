"""The op that the core calls; the platform decides the backend."""

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Float, Int

from lowrank_kv_jax.attention.partial import AttnPartial, merge
from lowrank_kv_jax.attention.rope import RopeSpec
from lowrank_kv_jax.pallas_kernels import dispatch
from lowrank_kv_jax.pallas_kernels.coefficient_attention import attend_to
from lowrank_kv_jax.pallas_kernels.over_mesh import (
    POSITIONS,
    QUERIES,
    cut,
    cut_basis,
    cut_tokens,
    devices,
    devices_of_heads,
    local,
    local_on_xla,
)
from lowrank_kv_jax.storage.basis import Basis, as_array
from lowrank_kv_jax.storage.cached_tokens import Beside, CachedTokens
from lowrank_kv_jax.storage.over_tokens import mesh_here

KERNELS = {"triton": "gpu_triton", "tpu": "tpu"}
"""Modules of this folder that hold the op, by backend."""


def rotary_coefficient_attention(
    q: Float[jax.Array, "B T N D"], tokens: CachedTokens, key_basis: Basis, *,
    rope: RopeSpec | None, kv_heads: int, scale: float, q_positions: Int[jax.Array, "B T"], causal: bool,
    window: int | None, value_basis: Float[jax.Array, "... Jv Wv Rv"] | None = None,
    key_mean: Float[jax.Array, "... K D"] | None = None, origin: int | None = None, cap: float | None = None,
    beside: Sequence[Beside] = (), backend: str | None = None,
) -> AttnPartial:
    """Attention over keys stored as coefficients: rebuilt, and rotated if they were taken before RoPE, block by block.

    Args:
        q: queries after RoPE `[B, T, N, D]`.
        tokens: `keys` holds coefficients `[B, J, S, R]`.
        key_basis: `[J, W, R]` or per row `[B, J, W, R]`, W = (kv_heads / J) * D; in factors, or a part of one.
        rope: rotation applied at the tokens' original positions; None leaves the rebuilt keys unrotated.
        kv_heads: K.
        scale, q_positions, causal, window, cap, backend: as in `coefficient_attention`.
        value_basis: give the output in head space (the compute order of OjaKV's section 3.3, which XLA follows by
            rebuilding the values; a kernel expands the attended coefficients, which is the same sum).
        key_mean: `[K, D]` or per row `[B, K, D]`, added to the rebuilt keys before they are rotated.
        origin: where keys but for their mean were taken turned by their place in tiles (`attention.turning`),
            the position that these are counted from.
        beside: other tokens to attend to, whose values lie in the same space; on one GPU the same programs read them
            where they can.

    Returns:
        Partial whose out is in the space of the values, or in head space with `value_basis`.

    Raises:
        ValueError: an unknown backend. A case that the backend's kernel does not cover runs on XLA, with a warning.
    """
    attend = functools.partial(_implementation, rope=rope, scale=scale, causal=causal, window=window, origin=origin)
    key_basis = as_array(key_basis) if devices() > 1 else key_basis
    arrays = {"q": q, "tokens": tokens, "key_basis": key_basis, "q_positions": q_positions, "value_basis": value_basis,
              "key_mean": key_mean}

    def specs():
        means = ("batch", "kv_heads", None)
        return {"q": cut(q, QUERIES), "tokens": cut_tokens(tokens), "key_basis": cut_basis(key_basis),
                "q_positions": cut(q_positions, POSITIONS),
                "value_basis": value_basis is not None and cut_basis(value_basis),
                "key_mean": key_mean is not None and cut(key_mean, means[-key_mean.ndim :])}

    on_device = functools.partial(attend, kv_heads=kv_heads // devices_of_heads())
    read = beside if cap is None and _reads_beside(backend, q, tokens, key_basis, value_basis, origin, beside) else ()
    told = {"gpu_triton": {"beside": read}} if read else {}
    kernels = {name: local(functools.partial(on_device, module, **told.get(module, {})), specs, arrays)
               for name, module in KERNELS.items()}
    if cap is not None:
        kernels = dispatch.without_kernels(kernels, "logits that are capped")
    reference = functools.partial(on_device, "reference", cap=cap)
    whole = functools.partial(reference, kv_heads=kv_heads, **arrays)

    def merged(part: AttnPartial, others: Sequence[Beside]) -> AttnPartial:
        return merge([*(attend_to(x, scale=scale, cap=cap, backend=backend) for x in others), part], kv_heads)

    on_xla = local_on_xla(reference, specs, arrays, whole)
    part = dispatch.run("rotary_coefficient_attention", backend, kernels, lambda: merged(on_xla(), read))
    return part if read else merged(part, beside)


def _reads_beside(backend, q, tokens, key_basis, value_basis, origin, beside: Sequence[Beside]) -> bool:
    """Whether it is one GPU whose kernel reads the others, too."""
    if not beside or mesh_here() is not None or value_basis is not None or origin is not None:
        return False
    if dispatch.choose(backend) != "triton":
        return False
    from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention import gpu_triton  # as in `_implementation`

    return gpu_triton.reads_beside(q, tokens, key_basis, beside)


def _implementation(module: str, key_basis: Basis, **arguments: Any) -> AttnPartial:
    """Call the op in a module of this folder, imported when it is needed: Pallas is not where XLA is enough."""
    key_basis = key_basis if module == KERNELS["triton"] else as_array(key_basis)
    found = importlib.import_module(f"{__package__}.{module}")
    return found.rotary_coefficient_attention(key_basis=key_basis, **arguments)
