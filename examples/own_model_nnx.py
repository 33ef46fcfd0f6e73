"""A Flax NNX decoder with RoPE of its own, over neighbouring channels, that decodes through any compressed cache.

    uv run examples/own_model_nnx.py --method ojakv:rank=0.5,rope=pre

The modules are told how to attend and know of no cache; caches are values beside them. `examples/own_model.py` has the
same in plain JAX.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
from flax import nnx

import lowrank_kv_jax as lkv

VOCAB, HIDDEN, INNER, LAYERS, BLOCK = 256, 64, 128, 2, 16
SPEC = lkv.AttentionSpec(
    num_layers=LAYERS, q_heads=8, kv_heads=4, head_dim=8, rope=lkv.RopeSpec(10000.0, 8, interleaved=True), context=1024,
    windows=(None,) * LAYERS,
)


# ---- the decoder ----------------------------------------------------------------------------------------------------


def rope(x, positions):
    """Channels 2i and 2i + 1 of x [B, T, H, D] turned by positions [B, T]: what `SPEC.rope` must say in words."""
    angle = positions[..., None, None] * 10000.0 ** (-jnp.arange(0, x.shape[-1], 2) / x.shape[-1])
    even, odd = x[..., ::2], x[..., 1::2]
    turned = even * jnp.cos(angle) - odd * jnp.sin(angle), odd * jnp.cos(angle) + even * jnp.sin(angle)
    return jnp.stack(turned, axis=-1).reshape(x.shape)


class Layer(nnx.Module):
    def __init__(self, rngs):
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        width, kv_width = SPEC.q_heads * SPEC.head_dim, SPEC.kv_heads * SPEC.head_dim
        self.before, self.behind = nnx.RMSNorm(HIDDEN, rngs=rngs), nnx.RMSNorm(HIDDEN, rngs=rngs)
        self.q, self.k, self.v = linear(HIDDEN, width), linear(HIDDEN, kv_width), linear(HIDDEN, kv_width)
        self.o, self.up, self.down = linear(width, HIDDEN), linear(HIDDEN, INNER), linear(INNER, HIDDEN)

    def __call__(self, x, positions, attend):
        y = self.before(x)
        q, k, v = (f(y).reshape(*x.shape[:2], -1, SPEC.head_dim) for f in (self.q, self.k, self.v))
        attended = attend(lkv.Taps(q=rope(q, positions), k=rope(k, positions), k_pre=k, v=v))
        x = x + self.o(attended.reshape(*x.shape[:2], -1))
        return x + self.down(nnx.gelu(self.up(self.behind(x))))


class Decoder(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, HIDDEN, rngs=rngs)
        self.layers = nnx.List([Layer(rngs) for _ in range(LAYERS)])
        self.norm, self.head = nnx.RMSNorm(HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, tokens, positions, attends):
        """Logits [B, T, V]; a function for each layer attends from its taps, [B, T, N, D]."""
        x = self.embed(tokens)
        for layer, attend in zip(self.layers, attends, strict=True):
            x = layer(x, positions, attend)
        return self.head(self.norm(x))


def init(key):
    return Decoder(nnx.Rngs(key))


def read(model, tokens, lengths=None):
    """Logits [B, T, V] and the taps of each layer, without any cache; read a second time where lengths [B] are given."""
    size, positions, seen = tokens.shape[1], jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape), []
    if lengths is not None:
        tokens, positions = lkv.prompt_twice(tokens, lengths)

    def attend(taps):
        again = None if lengths is None else lkv.attend_twice(taps.q, taps.k, taps.v, lengths, **SPEC.logits)
        attended, votes = again or (causal(taps), None)
        seen.append(taps.part(slice(size))._replace(reread=votes))
        return attended

    return model(tokens, positions, [attend] * LAYERS)[:, :size], seen


def causal(taps):
    """Exact attention of a prompt to itself, [B, T, N, D]."""
    k, v = (jnp.repeat(x, SPEC.group_size, axis=2) for x in (taps.k, taps.v))
    return jax.nn.dot_product_attention(taps.q, k, v, scale=SPEC.scale, is_causal=True)


# ---- through a cache ------------------------------------------------------------------------------------------------


@jax.jit
def prefill(model, plans, tokens, lengths):
    """Read a prompt exactly and compress it; a plan is of one layer, or of several that share a store."""
    logits, seen = read(model, tokens, lengths if plans[0].method.rereads else None)
    layers = iter(seen)
    caches = [lkv.prefill_layer(plan, [next(layers) for _ in plan.windows], lengths) for plan in plans]
    return caches, jnp.take_along_axis(logits, lengths[:, None, None] - 1, axis=1)


@functools.partial(jax.jit, donate_argnames="caches")
def extend(model, plans, caches, tokens):
    """Append tokens [B, T] to what is cached: the caches, and logits [B, T, V]."""
    new = list(caches)

    def through(index, taps):
        new[index], attended = lkv.append_and_attend(plans[index], new[index], taps)
        return attended

    attends = [functools.partial(through, index) for index, plan in enumerate(plans) for _ in plan.windows]
    return new, model(tokens, caches[0].positions(tokens.shape[1]), attends)


@functools.partial(jax.jit, donate_argnames="caches")
def refresh(plans, caches):
    return [lkv.refresh_layer(plan, cache) for plan, cache in zip(plans, caches, strict=True)]


def plan(method, model, texts, dtype=jnp.bfloat16, **sizes):
    """Bases from texts [B, T] where the method is calibrated, and a plan for each of its groups of layers."""
    calibrator, lengths = lkv.Calibrator(SPEC, method), jnp.full(len(texts), texts.shape[1])
    seen = jax.jit(read)(model, texts, lengths if lkv.parse_method(method).rereads else None)[1]
    lkv.check_rotation(SPEC, seen[0], jnp.broadcast_to(jnp.arange(texts.shape[1]), texts.shape))
    calibrator.add(seen)
    return lkv.plan_layers(method, SPEC, bases=calibrator.bases(method, dtype), block=BLOCK, dtype=dtype, **sizes)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="ojakv:rank=0.5,rope=pre")
    parser.add_argument("--tokens", type=int, default=48)
    args = parser.parse_args(argv)
    model, texts = init(jax.random.key(0)), jax.random.randint(jax.random.key(1), (2, 256), 0, VOCAB)
    plans = plan(args.method, model, texts, prompt=256, capacity=256 + args.tokens)
    caches, logits = prefill(model, plans, texts, jnp.asarray([256, 200]))
    said = []
    for step in range(args.tokens):
        if step and step % BLOCK == 0:
            caches = refresh(plans, caches)
        said.append(jnp.argmax(logits[:, -1:], axis=-1))
        caches, logits = extend(model, plans, caches, said[-1])
    print(jnp.concatenate(said, axis=1)[0].tolist())
    print(f"{args.method}: {lkv.cache_bytes(caches).smaller:.1f}x smaller than a 16-bit full cache")


if __name__ == "__main__":
    main()
