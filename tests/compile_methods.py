"""Attention through the cache of every registered method, compiled for a device that is not there."""

import dataclasses
import json
import sys
import warnings

import jax
import jax.numpy as jnp

from lowrank_kv_jax.evals.speed.compile_step import any_moments
from lowrank_kv_jax.evals.speed.llama_8b import LLAMA_8B
from lowrank_kv_jax.generation.forward import make_layout
from lowrank_kv_jax.method import Place
from lowrank_kv_jax.methods import REGISTRY, machine_of
from lowrank_kv_jax.pallas_kernels import dispatch
from lowrank_kv_jax.pallas_kernels.compile_only import NoCompiler, compile_for, device


def compile_attention(method, moments, target):
    """The first layer's attention of one decoded token."""
    layers = 1 if method.calibrated else 4  # four are the largest default group of layers
    model = dataclasses.replace(LLAMA_8B, num_layers=layers, windows=(None,) * layers)
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
    results, moments = [], any_moments()
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
