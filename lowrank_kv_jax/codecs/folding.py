"""Static projections folded into the weights around attention (Palu; StreamingKV, equations 6 and 13).

    latents    h = x A + a,   A = W_k V          in the place of x W_k + b followed by the encoder
    outputs    o W_o          =  o~ (V W_o)      in the place of expanding attended latents o~ to head space

The caches of this library code taps and expand values once a step, because partials over latents and over exact tokens
merge in head space; the two agree (tested to 1e-5). Folding pays where every token is coded and the rank of a group is
at most head_dim: a folded W_o holds R numbers for each D that it held. It is no option where a basis moves.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lowrank_kv_jax.attention.spec import AttentionSpec
from lowrank_kv_jax.storage import precise
from lowrank_kv_jax.storage.basis import split_heads


class Folded(NamedTuple):
    """Weights of one attention layer; float32.

    Attributes:
        k_kernel, v_kernel: A `[H, J R]`, with biases `[J R]`: latents of keys before RoPE, and of values.
        o_kernel: `[N R, H]`, reads attended value latents of every query head; with its bias `[H]`.
    """

    k_kernel: jax.Array
    k_bias: jax.Array
    v_kernel: jax.Array
    v_bias: jax.Array
    o_kernel: jax.Array
    o_bias: jax.Array


def fold_layer(spec: AttentionSpec, attention: dict[str, Any], bases: Any) -> Folded:
    """Fold one layer.

    Args:
        spec: the model's attention.
        attention: weights of the layer, `params["layers"][l]["attention"]`.
        bases: of the layer, with `k`, `v` `[J, W, R]` and `k_mean`, `v_mean` `[K, D]` or None.

    Raises:
        ValueError: a norm stands between the projection of keys and RoPE (Qwen3): latents of normed keys are no linear
            function of the hidden state, so that there is no weight to fold the encoder into.
    """
    if "k_norm" in attention:
        raise ValueError("fold: a norm of the keys stands between W_k and RoPE; their latents cannot be folded into W_k")
    k, v = (_fold_input(attention[f"{side}_proj"], getattr(bases, side), getattr(bases, f"{side}_mean"))
            for side in ("k", "v"))
    return Folded(*k, *v, *_fold_output(spec, attention["o_proj"], bases.v, bases.v_mean))


def _fold_input(projection: dict[str, jax.Array], basis: jax.Array, mean: jax.Array | None):
    """A `[H, J R]` and the latent of what is added to x W, `[J R]`."""
    kernel = projection["kernel"].astype(jnp.float32)
    groups, width, _ = basis.shape

    def code(rows):
        rows = rows.reshape(-1, groups, width)
        return precise.einsum("hjw,jwr->hjr", rows, basis.astype(jnp.float32)).reshape(len(rows), -1)

    offset = jnp.zeros(kernel.shape[-1:]) if "bias" not in projection else projection["bias"].astype(jnp.float32)
    offset = offset if mean is None else offset - mean.astype(jnp.float32).reshape(-1)
    return code(kernel), code(offset[None])[0]


def _fold_output(spec: AttentionSpec, projection: dict[str, jax.Array], basis: jax.Array, mean: jax.Array | None):
    """V W_o of each query head, and the output of the values' mean: attention weights sum to one."""
    kernel = projection["kernel"].astype(jnp.float32)
    by_query = kernel.reshape(spec.kv_heads, spec.group_size, spec.head_dim, -1)
    by_head = split_heads(basis.astype(jnp.float32), spec.kv_heads)
    by_head = by_head.reshape(spec.kv_heads, spec.head_dim, -1)
    folded = precise.einsum("kdr,kgdh->kgrh", by_head, by_query)
    bias = jnp.zeros(kernel.shape[-1:]) if "bias" not in projection else projection["bias"].astype(jnp.float32)
    if mean is not None:
        bias = bias + precise.einsum("kd,kgdh->h", mean.astype(jnp.float32), by_query)
    return folded.reshape(-1, kernel.shape[-1]), bias
