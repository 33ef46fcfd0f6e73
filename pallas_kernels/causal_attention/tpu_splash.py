"""The op by JAX's own flash attention for TPUs, "splash attention", which skips the blocks that nobody sees."""

import functools

import jax
import jax.numpy as jnp

from lowrank_kv_jax.attention.partial import AttnPartial
from lowrank_kv_jax.pallas_kernels.dispatch import Unsupported
from lowrank_kv_jax.pallas_kernels.over_mesh import alone
from lowrank_kv_jax.storage.block_reads import BLOCK

LANES = 128  # heads are as wide as a register, or a multiple of it


def causal_attention(q, k, v, sink_logits, *, scale, window, interpret=False):
    """The op of `api.causal_attention`; `Unsupported` where the kernel does not cover a case."""
    attend, dim = _attend(q, v, window, interpret, residuals=False), v.shape[3]
    attend = functools.partial(attend, sinks=sink_logits)
    return _tokens_first(jax.vmap(attend)(*_prepared(q, k, v, scale)), q.shape[1], dim)


def causal_partial(q, k, v, *, scale, window, interpret=False) -> AttnPartial:
    """The op of `api.causal_partial`; `Unsupported` where the kernel does not cover a case."""
    attend, dim = _attend(q, v, window, interpret, residuals=True), v.shape[3]
    out, (lse,) = jax.vmap(attend)(*_prepared(q, k, v, scale))
    out = _tokens_first(out, q.shape[1], dim).astype(jnp.float32)
    return AttnPartial(out, lse.swapaxes(1, 2)[:, : q.shape[1]])


def _attend(q, v, window, interpret, *, residuals: bool):
    """The kernel of one row, heads first."""
    try:
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
    except ImportError as reason:
        raise Unsupported(f"this JAX has no splash attention: {reason}") from reason
    if not {x.dtype for x in (q, v)} == {jnp.dtype(jnp.bfloat16)}:
        raise Unsupported("splash attention multiplies in bfloat16, the model's queries, keys and values are "
                          f"{', '.join(sorted({x.dtype.name for x in (q, v)}))}")
    if not alone():
        raise Unsupported("the compiler cannot lay a kernel out over several devices, and no mesh is told")
    square = (q.shape[1] + -q.shape[1] % BLOCK,) * 2
    mask = splash_attention_mask.LocalMask(square, (None if window is None else window - 1, 0), 0)
    return splash_attention_kernel.make_splash_mha_single_device(
        splash_attention_mask.MultiHeadMask([mask] * q.shape[2]),
        block_sizes=splash_attention_kernel.BlockSizes(block_q=BLOCK, block_kv=BLOCK, block_kv_compute=BLOCK),
        interpret=interpret, save_residuals=residuals,
    )


def _prepared(q, k, v, scale):
    """Heads first. The kernel has no scale: the queries carry it, rounded once more to their dtype."""
    return tuple(_heads_first(x) for x in ((q.astype(jnp.float32) * scale).astype(q.dtype), k, v))


def _tokens_first(out, size: int, dim: int):
    """`[B, T, N, D]` without what `_heads_first` added."""
    return out.swapaxes(1, 2)[:, :size, :, :dim]


def _heads_first(x: jax.Array) -> jax.Array:
    """`[B, N, T, D]` of `[B, T, N, D]`, with zeros to whole blocks of tokens and whole registers of channels."""
    tokens, channels = -x.shape[1] % BLOCK, -x.shape[3] % LANES
    return jnp.pad(x.swapaxes(1, 2), ((0, 0), (0, 0), (0, tokens), (0, channels)))
