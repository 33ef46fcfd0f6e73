"""The ops that the core calls; a GPU has kernels, all others XLA's products, sums and sorts."""

from collections.abc import Callable

import jax
from jaxtyping import Float, Float32, Int32

from lowrank_kv_jax.pallas_kernels import dispatch
from lowrank_kv_jax.pallas_kernels.page_choice.chosen import Chosen
from lowrank_kv_jax.storage.backend import choose
from lowrank_kv_jax.storage.over_tokens import mesh_here


def page_logits(
    q: Float[jax.Array, "B K M D"], high: Float[jax.Array, "B K C D"], low: Float[jax.Array, "B K C D"] | None = None, *,
    reference: Callable[[], Float32[jax.Array, "B K M C"]],
) -> Float32[jax.Array, "B K M C"]:
    """Products of queries with what stands for a page's keys, not scaled: float32 `[B, K, M, C]`.

    Args:
        q: in any dtype; products are exact, and their sums float32.
        high: the marks of C pages.
        low: where there are some, too, each channel counts with the one of both that gives more: sum_d
            max(q_d low_d, q_d high_d) of low <= high. Pages without a token may have anything.
        reference: the same by XLA, called where there is no kernel for a case. Nothing is warned of.
    """
    if not _by_kernel():
        return reference()
    from lowrank_kv_jax.pallas_kernels.page_choice import gpu_logits  # Pallas is not where XLA is enough

    try:
        return gpu_logits.page_logits(q, high, low, interpret=dispatch.interpreted("triton"))
    except dispatch.Unsupported:
        return reference()


def choose_pages(
    logits: Float32[jax.Array, "B K M C"], lengths: Int32[jax.Array, " B"], apart: Int32[jax.Array, "B U O"] | None, *,
    units: int, queries: int, count: int, page: int, together: str, scale: float, cap: float | None,
    reference: Callable[[], Chosen],
) -> Chosen:
    """The pages that `method.pages.choose` describes. The kernel takes a single query, which is no padding.

    Args:
        logits: of M = T * G queries of each kv head, not scaled.
        lengths: stored tokens.
        apart: numbers of pages that are left out, or None.
        units: U.
        queries: T.
        count: pages that are wanted, of C.
        page: tokens of one.
        together: "sum" or "max" of the shares that a unit's query heads give a page.
        scale, cap: of the logits.
        reference: the same by XLA, called where there is no kernel for a case. Nothing is warned of.
    """
    if not _by_kernel():
        return reference()
    from lowrank_kv_jax.pallas_kernels.page_choice import gpu_choice  # Pallas is not where XLA is enough

    try:
        return gpu_choice.choose_pages(
            logits, lengths, apart, units=units, queries=queries, count=count, page=page, together=together, scale=scale,
            cap=cap, interpret=dispatch.interpreted("triton"))
    except dispatch.Unsupported:
        return reference()


def _by_kernel() -> bool:
    """Whether one GPU is what is traced for."""
    mesh = mesh_here()
    return choose(None) == "triton" and (mesh is None or mesh.size == 1)
