"""Attention through the cache of every registered method, compiled for a device that is not there."""

import json
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.attention.rope import RopeSpec
from lowrank_kv_jax.estimators.moments import Moments
from lowrank_kv_jax.generation.forward import make_layout
from lowrank_kv_jax.method import Place
from lowrank_kv_jax.methods import REGISTRY, machine_of
from lowrank_kv_jax.models.config import ModelConfig
from lowrank_kv_jax.pallas_kernels import dispatch
from lowrank_kv_jax.pallas_kernels.compile_only import NoCompiler, compile_for, device


def config(layers):
    return ModelConfig(
        family="llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=layers, q_heads=32,
        kv_heads=8, head_dim=128, norm_eps=1e-5, rope=RopeSpec(500000.0, 128), context=131072, windows=(None,) * layers,
    )


def some_moments():
    """Full-rank moments of one layer; which ones decides no shape."""
    spec, rng = config(1).attention, np.random.default_rng(0)
    width = spec.kv_heads * spec.head_dim
    tokens = rng.normal(size=(2 * width, width))
    wide = np.broadcast_to(tokens.T @ tokens, (1, width, width))
    heads = np.broadcast_to(wide[0, :128, :128], (1, spec.kv_heads, 128, 128))
    votes = np.broadcast_to(np.linspace(1.0, 0.0, 61), (1, 61))  # the share of a layer's votes above rising edges
    return Moments(2 * width, wide, wide, wide, heads, heads, votes=votes)


def compile_attention(method, moments, target):
    """The first layer's attention of one decoded token."""
    model = config(1 if method.calibrated else 4)  # four are the largest default group of layers
    spec, layout = model.attention, make_layout(model, 1, 4096, 8192)
    bases = (method.fit(spec, moments) if method.calibrated else method.default_bases(spec))[0]
    state = jax.eval_shape(lambda: machine_of(method).init(layout, bases))
    q, positions = jax.ShapeDtypeStruct((1, 1, 32, 128), jnp.bfloat16), jax.ShapeDtypeStruct((1, 1), jnp.int32)

    def attend(state, q, positions):
        return machine_of(method).attend(layout, bases, state, q, positions, Place()).out

    compile_for(target, attend, state, q, positions)


def main(target):
    try:
        device(target)
    except NoCompiler as reason:
        return {"results": [], "missing": {target: str(reason)}}
    results, moments = [], some_moments()
    for name, cls in sorted(REGISTRY.items()):
        dispatch._warn_once.cache_clear()
        failure = None
        print(name, file=sys.stderr, flush=True)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                compile_attention(cls(), moments, target)
            except Exception as error:  # a compiler raises what it likes
                failure = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        texts = [str(x.message) for x in said if issubclass(x.category, RuntimeWarning)]
        results.append({"method": name, "failure": failure, "said": texts})
    return {"results": results, "missing": {}}


if __name__ == "__main__":
    json.dump(main(sys.argv[1]), sys.stdout)
