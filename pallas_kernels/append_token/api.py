"""The op that the core calls; a GPU has a kernel, all others XLA's writes."""

from collections.abc import Callable

import jax
from jaxtyping import Float, Int32, Shaped

from lowrank_kv_jax.pallas_kernels import dispatch
from lowrank_kv_jax.pallas_kernels.append_token.buffers import Buffers
from lowrank_kv_jax.storage.backend import choose
from lowrank_kv_jax.storage.over_tokens import mesh_here


def append_token(
    buffers: Buffers, q: Float[jax.Array, "B T N D"], k: Shaped[jax.Array, "B K T D"], v: Shaped[jax.Array, "B K T D"],
    counts: Int32[jax.Array, " B"], *, reference: Callable[[], tuple[Buffers, jax.Array]],
) -> tuple[Buffers, jax.Array]:
    """The first `counts[b]` of T tokens of each row written, in place where the buffers are donated; what has no room is
    dropped. The kernel takes a decoded token, T = 1.

    Args:
        q: the queries beside them. XLA for a GPU would rotate and round query, key and value by a program each, and write
            by another two, where they are one here and a second that writes; they come back as the second leaves them.
        reference: the same by XLA, called where there is no kernel for a case. Nothing is warned of.

    Returns:
        The buffers, and the queries.
    """
    mesh = mesh_here()
    if choose(None) != "triton" or (mesh is not None and mesh.size > 1):
        return reference()
    from lowrank_kv_jax.pallas_kernels.append_token import gpu_triton  # Pallas is not where XLA is enough

    try:
        return gpu_triton.append_token(buffers, q, k, v, counts, interpret=dispatch.interpreted("triton"))
    except dispatch.Unsupported:
        return reference()
