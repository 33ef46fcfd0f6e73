"""The op by JAX's own flash attention for TPUs, "splash attention", which skips the blocks that nobody sees."""

import functools

import jax
import jax.numpy as jnp

from lowrank_kv_jax.pallas_kernels.dispatch import Unsupported
from lowrank_kv_jax.storage.block_reads import BLOCK

LANES = 128  # heads are as wide as a register, or a multiple of it


def causal_attention(q, k, v, sink_logits, *, scale, window, interpret=False):
    """The op of `api.causal_attention`; `Unsupported` where the kernel does not cover a case."""
    try:
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
    except ImportError as reason:
        raise Unsupported(f"this JAX has no splash attention: {reason}") from reason
    if not {x.dtype for x in (q, k, v)} == {jnp.dtype(jnp.bfloat16)}:
        raise Unsupported("splash attention multiplies in bfloat16, the model's queries, keys and values are "
                          f"{', '.join(sorted({x.dtype.name for x in (q, k, v)}))}")
    if jax.device_count() > 1:
        raise Unsupported("the compiler cannot lay a kernel out over several devices")
    size, dim = q.shape[1], v.shape[3]
    # the kernel has no scale: the queries carry it, rounded once more to their dtype
    q, k, v = (_heads_first(x) for x in ((q.astype(jnp.float32) * scale).astype(q.dtype), k, v))
    square, left = (q.shape[2],) * 2, None if window is None else window - 1
    mask = splash_attention_mask.LocalMask(square, (left, 0), 0)
    attend = splash_attention_kernel.make_splash_mha_single_device(
        splash_attention_mask.MultiHeadMask([mask] * q.shape[1]),
        block_sizes=splash_attention_kernel.BlockSizes(block_q=BLOCK, block_kv=BLOCK, block_kv_compute=BLOCK),
        interpret=interpret,
    )
    attend = functools.partial(attend, sinks=sink_logits)
    return jax.vmap(attend)(q, k, v).swapaxes(1, 2)[:, :size, :, :dim]


def _heads_first(x: jax.Array) -> jax.Array:
    """`[B, N, T, D]` of `[B, T, N, D]`, with zeros to whole blocks of tokens and whole registers of channels."""
    tokens, channels = -x.shape[1] % BLOCK, -x.shape[3] % LANES
    return jnp.pad(x.swapaxes(1, 2), ((0, 0), (0, 0), (0, tokens), (0, channels)))
