"""The decode step of a whole model, compiled for hardware that is not there: what depth costs."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lowrank_kv_jax.evals.speed.compile_step import (
    axes_of,
    everywhere_on,
    layout_over,
    of_devices,
    program_facts,
    state_over,
)
from lowrank_kv_jax.evals.speed.llama_8b import LLAMA_8B
from lowrank_kv_jax.evals.speed.roofline import white_bases
from lowrank_kv_jax.generation.forward import decode_step
from lowrank_kv_jax.method import Part
from lowrank_kv_jax.method.cache import Cache
from lowrank_kv_jax.methods.compose import machine_of
from lowrank_kv_jax.methods.parse import spell_method
from lowrank_kv_jax.models.parameter_sharding import param_shardings
from lowrank_kv_jax.models.parameters import param_table
from lowrank_kv_jax.pallas_kernels.compile_grid import Result
from lowrank_kv_jax.pallas_kernels.compile_only import NoCompiler
from lowrank_kv_jax.storage.lanes import lay_out

CACHE = 2


def compile_models(
    targets: Sequence[str], methods: Mapping[str, Part], layers: Sequence[int], tokens: int = 32768, over: int = 4
) -> tuple[list[Result], dict[str, str]]:
    """Facts of the step of Llama 3.1 8B cut to so many layers, as `compile_step` says them, for every target whose
    compiler is there, and of the first of these over several devices; and the reasons of targets that were left out."""
    results, missing = [], {}
    for target in targets:
        try:
            for method in methods.values():
                asked = [(count, 1, "model") for count in layers]
                asked += [(layers[0], over, axis) for axis in axes_of(method)]
                for count, devices, axis in asked:
                    name = f"step of {count} layers at {tokens} tokens, {spell_method(method)}"
                    program = functools.partial(model_program, method, target, count, tokens, devices, axis)
                    results.append(program_facts(name + of_devices(devices, axis), target, program, CACHE))
        except NoCompiler as reason:
            missing[target] = str(reason)
    return results, missing


def model_program(
    method: Part, target: str, layers: int, tokens: int, over: int = 1, axis: str = "model"
) -> tuple[Any, tuple[Any, ...]]:
    """The step, one row of bfloat16: a function and the shapes of its arguments, of which `CACHE` is the cache.

    Args:
        over, axis: as for `compile_step`.
    """
    config = dataclasses.replace(LLAMA_8B, num_layers=layers, windows=(None,) * layers)
    mesh, layout = layout_over(method, config, target, tokens, over, axis)
    own = white_bases(config.attention, method, layout.dtype)

    def empty() -> tuple[Any, ...]:
        groups = zip(method.layer_groups(config.attention), own, strict=True)
        return tuple(
            lay_out(machine_of(method).init(layout.of_group(group), bases), layout.tokens) for group, bases in groups)

    states, everywhere = state_over(mesh, jax.eval_shape(empty)), everywhere_on(mesh)
    token, pending = (everywhere(jax.ShapeDtypeStruct(shape, jnp.int32)) for shape in ((1,), ()))
    cache = Cache(states, token, token, pending, method, layout)
    weights = jax.tree.map(
        lambda info, place: jax.ShapeDtypeStruct(info.shape, jnp.bfloat16, sharding=place), param_table(config),
        param_shardings(config, mesh))

    def step(weights: Any, bases: Any, cache: Cache, token: jax.Array) -> tuple[Cache, jax.Array]:
        return decode_step(method, config, weights, cache, token, bases=bases)

    return step, (weights, jax.tree.map(everywhere, own), cache, token)
