"""What a block of decoding needs beside its cache, as the compiler plans it."""

from typing import Any

import jax
import jax.numpy as jnp

from lowrank_kv_jax.generation.generate import Progress, decode_block
from lowrank_kv_jax.method import Layout, Part
from lowrank_kv_jax.saving.saved_cache import abstract_cache


def temporary_bytes(model: Any, method: Part, bases: Any, layout: Layout) -> int:
    """Temporaries of the loop over the tokens between two refreshes, and of the refresh: compiled, not run.

    Args:
        bases: as for `prefill`.
        layout: of the cache, on this process' own devices.
    """
    batch = layout.batch
    token, flag = (jax.ShapeDtypeStruct((batch,), dtype) for dtype in (jnp.int32, bool))
    keys = jax.eval_shape(lambda: jax.vmap(jax.random.key)(jnp.zeros(batch, jnp.uint32)))
    steps = jax.ShapeDtypeStruct((), jnp.int32)
    cache = abstract_cache(method, layout, bases)
    loop = decode_block.lower(
        method, model.config, model.params, cache, Progress(token, flag, flag), keys, steps, bases=bases
    )
    return loop.compile().memory_analysis().temp_size_in_bytes
