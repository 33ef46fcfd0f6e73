"""A decode loop of your own: prefill, decode steps under jit, a refresh every block.

    uv run examples/decode_loop.py
"""

import functools

import jax
import jax.numpy as jnp

import lowrank_kv_jax as lkv

model = lkv.load_model("smollm2-135m")
method = lkv.methods.SingleSVD(rank=0.25)  # needs no calibration: its bases are fitted to the prompt
prompt = model.tokenizer.encode("Attention is a weighted mean of values, and a cache is what it remembers. " * 40)

cache, logits = lkv.prefill(
    method, model.config, model.params, jnp.asarray([prompt]), capacity=len(prompt) + 64, dtype=jnp.bfloat16
)


@functools.partial(jax.jit, donate_argnames="cache")
def step(params, cache, token):
    """One token for every row. The donated cache is updated in place."""
    cache, logits = lkv.decode_step(method, model.config, params, cache, token)
    return cache, jnp.argmax(logits, axis=-1).astype(jnp.int32)


token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
tokens = [token]
for i in range(63):
    cache, token = step(model.params, cache, token)
    tokens.append(token)
    if (i + 1) % cache.layout.block == 0:  # flush, evict, move bases: whatever the method does between blocks
        cache = lkv.refresh(method, cache)

print(model.tokenizer.decode(jnp.stack(tokens, axis=1)[0].tolist()))
used = lkv.cache_bytes(cache)
print(f"{used.total / 1e6:.1f} MB, {used.smaller:.1f}x smaller than a 16-bit full cache")
