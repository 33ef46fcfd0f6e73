"""A Llama in plain JAX that decodes through any compressed cache.

    uv run examples/own_model.py --method single-svd:rank=0.5+snapkv:keep=0.5

Its weights are random: what is shown is where a cache meets a decoder. `taps` is what a cache must be shown, `prefill`
and `extend` are the only functions that know of one.
"""

import argparse
import functools

import jax
import jax.numpy as jnp

import lowrank_kv_jax as lkv

VOCAB, HIDDEN, INNER, LAYERS, BLOCK = 256, 64, 128, 2, 16
SPEC = lkv.AttentionSpec(
    num_layers=LAYERS, q_heads=8, kv_heads=4, head_dim=8, rope=lkv.RopeSpec(10000.0, 8), context=1024,
    windows=(None,) * LAYERS,
)


# ---- the decoder: nothing here knows of caches ----------------------------------------------------------------------


def init(key):
    q, kv = SPEC.q_heads * SPEC.head_dim, SPEC.kv_heads * SPEC.head_dim
    layer = {"q": (HIDDEN, q), "k": (HIDDEN, kv), "v": (HIDDEN, kv), "o": (q, HIDDEN), "gate": (HIDDEN, INNER),
             "up": (HIDDEN, INNER), "down": (INNER, HIDDEN)}
    shapes = {"embed": (VOCAB, HIDDEN), "layers": [layer] * LAYERS, "head": (HIDDEN, VOCAB)}
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(key, len(leaves))
    return tree.unflatten([jax.random.normal(k, s) * s[0] ** -0.5 for k, s in zip(keys, leaves, strict=True)])


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5)


def taps(weights, x, positions):
    """Heads of x [B, T, H] at positions [B, T], before and after RoPE."""
    q, k, v = ((norm(x) @ weights[name]).reshape(*x.shape[:2], -1, SPEC.head_dim) for name in "qkv")
    return lkv.rotary_taps(SPEC, q, k, v, positions)


def causal(own):
    """Exact attention of a prompt to itself, [B, T, N, D]."""
    k, v = (jnp.repeat(x, SPEC.group_size, axis=2) for x in (own.k, own.v))
    return jax.nn.dot_product_attention(own.q, k, v, scale=SPEC.scale, is_causal=True)


def output(weights, x, attended):
    x = x + attended.reshape(*x.shape[:2], -1) @ weights["o"]
    return x + (jax.nn.silu(norm(x) @ weights["gate"]) * (norm(x) @ weights["up"])) @ weights["down"]


def read(params, tokens, lengths=None):
    """Logits [B, T, V] and the taps of each layer, without any cache; read a second time where lengths [B] are given."""
    size, positions, seen = tokens.shape[1], jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape), []
    if lengths is not None:
        tokens, positions = lkv.prompt_twice(tokens, lengths)
    x = params["embed"][tokens]
    for weights in params["layers"]:
        own = taps(weights, x, positions)
        again = None if lengths is None else lkv.attend_twice(own.q, own.k, own.v, lengths, **SPEC.logits)
        attended, votes = again or (causal(own), None)
        x = output(weights, x, attended)
        seen.append(own.part(slice(size))._replace(reread=votes))
    return norm(x[:, :size]) @ params["head"], seen


# ---- through a cache ------------------------------------------------------------------------------------------------


@jax.jit
def prefill(params, plans, tokens, lengths):
    """Read a prompt exactly and compress it; a plan is of one layer, or of several that share a store."""
    logits, seen = read(params, tokens, lengths if plans[0].method.rereads else None)
    layers = iter(seen)
    caches = [lkv.prefill_layer(plan, [next(layers) for _ in plan.windows], lengths) for plan in plans]
    return caches, jnp.take_along_axis(logits, lengths[:, None, None] - 1, axis=1)


@functools.partial(jax.jit, donate_argnames="caches")
def extend(params, plans, caches, tokens):
    """Append tokens [B, T] to what is cached: the caches, and logits [B, T, V]."""
    x, positions, layers, new = params["embed"][tokens], caches[0].positions(tokens.shape[1]), iter(params["layers"]), []
    for plan, cache in zip(plans, caches, strict=True):
        for _ in plan.windows:
            weights = next(layers)
            cache, attended = lkv.append_and_attend(plan, cache, taps(weights, x, positions))
            x = output(weights, x, attended)
        new.append(cache)
    return new, norm(x) @ params["head"]


@functools.partial(jax.jit, donate_argnames="caches")
def refresh(plans, caches):
    return [lkv.refresh_layer(plan, cache) for plan, cache in zip(plans, caches, strict=True)]


def plan(method, params, texts, dtype=jnp.bfloat16, **sizes):
    """Bases from texts [B, T] where the method is calibrated, and a plan for each of its groups of layers."""
    calibrator, lengths = lkv.Calibrator(SPEC, method), jnp.full(len(texts), texts.shape[1])
    calibrator.add(jax.jit(read)(params, texts, lengths if lkv.parse_method(method).rereads else None)[1])
    return lkv.plan_layers(method, SPEC, bases=calibrator.bases(method, dtype), block=BLOCK, dtype=dtype, **sizes)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="single-svd:rank=0.5+snapkv:keep=0.5")
    parser.add_argument("--tokens", type=int, default=48)
    args = parser.parse_args(argv)
    params, texts = init(jax.random.key(0)), jax.random.randint(jax.random.key(1), (2, 256), 0, VOCAB)
    plans = plan(args.method, params, texts, prompt=256, capacity=256 + args.tokens)
    caches, logits = prefill(params, plans, texts, jnp.asarray([256, 200]))
    said = []
    for step in range(args.tokens):
        if step and step % BLOCK == 0:
            caches = refresh(plans, caches)
        said.append(jnp.argmax(logits[:, -1:], axis=-1))
        caches, logits = extend(params, plans, caches, said[-1])
    print(jnp.concatenate(said, axis=1)[0].tolist())
    print(f"{args.method}: {lkv.cache_bytes(caches).smaller:.1f}x smaller than a 16-bit full cache")


if __name__ == "__main__":
    main()
