"""The op by cuDNN's flash attention, as JAX calls it."""

import jax

from lowrank_kv_jax.pallas_kernels.dispatch import Unsupported

DTYPES = ("bfloat16", "float16")


def causal_attention(q, k, v, sink_logits, *, scale, window, interpret=False):
    """The op of `api.causal_attention`; `Unsupported` where cuDNN is not there or does not cover a case."""
    if interpret:
        raise Unsupported("cuDNN takes a GPU")
    if sink_logits is not None:
        raise Unsupported("a softmax with sink logits")
    if not {x.dtype.name for x in (q, k, v)} <= set(DTYPES):
        raise Unsupported(f"cuDNN takes {' and '.join(DTYPES)}, the model's queries, keys and values are "
                          f"{', '.join(sorted({x.dtype.name for x in (q, k, v)}))}")
    local = None if window is None else (window - 1, 0)
    try:
        return jax.nn.dot_product_attention(
            q, k, v, scale=scale, is_causal=True, local_window_size=local, implementation="cudnn"
        )
    except (ImportError, NotImplementedError, RuntimeError, ValueError) as reason:  # what JAX refuses while it traces
        raise Unsupported(" ".join(str(reason).split())) from reason
