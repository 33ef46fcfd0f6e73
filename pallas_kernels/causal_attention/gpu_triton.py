"""The op with its log-sum-exp by JAX's own flash attention in Triton: JAX rounds cuDNN's log-sum-exp to 16 bits."""

import math
import warnings

import jax.numpy as jnp

from lowrank_kv_jax.attention.partial import AttnPartial
from lowrank_kv_jax.pallas_kernels.causal_attention.gpu_cudnn import DTYPES
from lowrank_kv_jax.pallas_kernels.dispatch import Unsupported
from lowrank_kv_jax.pallas_kernels.gpu_shared_memory import there
from lowrank_kv_jax.pallas_kernels.packing import power_of_two

TILE = 128  # queries of a program; prompts are padded to whole ones
NARROW = 64  # channels, up to which its keys are as many; of wider ones half


def causal_partial(q, k, v, *, scale, window, interpret=False) -> AttnPartial:
    """The op of `api.causal_partial`; `Unsupported` where the kernel does not cover a case."""
    try:
        with warnings.catch_warnings():  # from 0.11 on JAX points to tokamax, where it will move
            warnings.simplefilter("ignore", DeprecationWarning)
            from jax.experimental.pallas.ops.gpu import attention
    except ImportError as reason:
        raise Unsupported(f"this JAX has no flash attention in Triton: {reason}") from reason
    if window is not None:
        raise Unsupported("JAX's flash attention in Triton has no sliding window")
    if not {x.dtype.name for x in (q, k, v)} <= set(DTYPES):
        raise Unsupported(f"JAX's flash attention in Triton is taken for {' and '.join(DTYPES)}, the model's queries, "
                          f"keys and values are {', '.join(sorted({x.dtype.name for x in (q, k, v)}))}")
    if not q.shape[-1] == k.shape[-1] == v.shape[-1]:
        raise Unsupported(f"keys of {k.shape[-1]} channels and values of {v.shape[-1]}")
    keys = TILE if q.shape[-1] <= NARROW else TILE // 2
    # a tile of queries, and two stages of keys and values
    needed = (TILE + 4 * keys) * power_of_two(q.shape[-1], 16) * q.dtype.itemsize
    if needed > (most := there()):
        raise Unsupported(f"heads of {q.shape[-1]} channels need {needed} bytes of shared memory, the GPU has {most}")
    size, group = q.shape[1], q.shape[2] // k.shape[2]
    q, k, v = (jnp.pad(x, ((0, 0), (0, -size % TILE), (0, 0), (0, 0))) for x in (q, k, v))
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))  # of a chunk alone: it has a head of keys for one of queries
    out, lse = attention.mha(q, k, v, None, scale, causal=True, interpret=interpret, return_residuals=True,
                             block_sizes=attention.BlockSizes(block_q=TILE, block_k=keys))
    lse = lse.swapaxes(1, 2) * math.log(2)  # the kernel counts in powers of two
    return AttnPartial(out[:, :size].astype(jnp.float32), lse[:, :size])
