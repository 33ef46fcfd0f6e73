"""The op that the core calls; a GPU has a kernel for a single query, all others XLA's products."""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from lowrank_kv_jax.attention.partial import AttnPartial, merge
from lowrank_kv_jax.pallas_kernels import dispatch
from lowrank_kv_jax.pallas_kernels.coefficient_attention import attend_to
from lowrank_kv_jax.storage.backend import choose
from lowrank_kv_jax.storage.basis import Basis, expand_values
from lowrank_kv_jax.storage.cached_tokens import Beside
from lowrank_kv_jax.storage.over_tokens import mesh_here


def expanded_values(
    basis: Basis | None, part: AttnPartial, kv_heads: int, *, mean: Float[jax.Array, "... K D"] | None = None,
    beside: Beside | None = None, scale: float, cap: float | None = None,
) -> AttnPartial:
    """Attention in head space, o = o~ U_v^T + mean, over stored tokens and others.

    Args:
        basis: of the values `[J, W, R]` or of each row `[B, J, W, R]`; None where they are in head space already.
        part: of the stored tokens `[B, T, N, R]`.
        mean: that values were coded without, `[K, D]` or `[B, K, D]`.
        beside: other tokens of the same queries.
        scale, cap: of their logits.

    Returns:
        Partial `[B, T, N, D]`; by the kernel its `out` is rounded to the dtype of the queries.
    """
    mesh = mesh_here()
    alone = mesh is None or mesh.size == 1
    if basis is not None and beside is not None and alone and choose(None) == "triton":
        from lowrank_kv_jax.pallas_kernels.expanded_values import gpu_triton  # Pallas is not where XLA is enough

        try:
            return gpu_triton.expanded_values(
                basis, part, kv_heads, mean, beside, scale=scale, cap=cap, interpret=dispatch.interpreted("triton"))
        except dispatch.Unsupported:
            pass
    out = part.out if basis is None else expand_values(basis, part.out, kv_heads)
    own = AttnPartial(_around(out, part.lse, mean), part.lse)
    return own if beside is None else merge([attend_to(beside, scale=scale, cap=cap), own], kv_heads)


def _around(out: jax.Array, lse: jax.Array, mean: jax.Array | None) -> jax.Array:
    """Attended values `[B, T, N, D]` with their mean; an empty part stays zero."""
    if mean is None:
        return out
    mean = jnp.repeat(mean.astype(out.dtype), out.shape[2] // mean.shape[-2], axis=-2)
    return jnp.where(jnp.isneginf(lse)[..., None], out, out + (mean if mean.ndim == 2 else mean[:, None]))
