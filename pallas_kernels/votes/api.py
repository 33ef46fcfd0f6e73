"""The op that the core calls; a GPU has a kernel, all others XLA's products."""

from collections.abc import Callable, Iterable
from typing import Any

import jax

from lowrank_kv_jax.pallas_kernels import dispatch
from lowrank_kv_jax.pallas_kernels.votes.asked import Asked
from lowrank_kv_jax.storage.backend import choose
from lowrank_kv_jax.storage.over_tokens import mesh_here


def add_votes(
    asked: Callable[[], Iterable[Asked]], lse: jax.Array, *, scale: float, least: jax.Array | None = None,
    reference: Callable[[], Any],
) -> Any:
    """Votes and the sum over queries of exp(q . k scale - lse), by tokens (H2O's accumulated attention), or the number of
    queries for which the mean over a buffer's query heads is large (Scissorhands).

    Args:
        asked: gives what the same queries vote for, where a kernel may read it: exact tokens, and stored ones.
        lse: float32 `[B, T, N]`, their total log-sum-exp; inf of queries that do not vote.
        scale: of the logits.
        least: float32 `[B, T]`, what such means are to exceed to count as 1; None: sums are the votes.
        reference: the same by XLA, called where there is no kernel for a case. Nothing is warned of: its products read
            the tokens once, too, and hold logits of float32 beside them.

    Returns:
        float32 `[B, J, S]` of each, or what `reference` returns.
    """
    mesh = mesh_here()
    if choose(None) != "triton" or (mesh is not None and mesh.size > 1):
        return reference()
    from lowrank_kv_jax.pallas_kernels.votes import gpu_triton  # Pallas is not where XLA is enough

    try:
        return gpu_triton.add_votes(
            tuple(asked()), lse, scale=scale, least=least, interpret=dispatch.interpreted("triton"))
    except dispatch.Unsupported:
        return reference()
