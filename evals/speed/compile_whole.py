"""Programs that a model runs, compiled whole for hardware that is not there: what they need beside their arguments."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lowrank_kv_jax.evals.speed.compile_chunk import reading_program
from lowrank_kv_jax.evals.speed.compile_step import (
    axes_of,
    compile_refresh,
    compile_step,
    everywhere_on,
    layout_over,
    of_devices,
    program_facts,
    shape_on,
)
from lowrank_kv_jax.evals.speed.llama_8b import LLAMA_8B, layer_weights
from lowrank_kv_jax.generation.layers import layer_prefill
from lowrank_kv_jax.method import Part
from lowrank_kv_jax.methods.parse import as_method
from lowrank_kv_jax.models.config import ModelConfig
from lowrank_kv_jax.models.parameter_sharding import param_shardings
from lowrank_kv_jax.pallas_kernels.compile_grid import Result
from lowrank_kv_jax.pallas_kernels.compile_only import NoCompiler

METHODS = ("full", "kivi:bits=4")


def prefill_program(
    target: str, tokens: int = 32768, over: int = 1, config: ModelConfig = LLAMA_8B
) -> tuple[Any, tuple[Any, ...]]:
    """The exact prefill of the first layer, one row of bfloat16, as a function and the shapes of its arguments.

    Args:
        over: devices, over which heads are cut.
    """
    mesh, layout = layout_over(as_method("full"), config, target, tokens, over, "model")
    everywhere = everywhere_on(mesh)
    hidden = everywhere(jax.ShapeDtypeStruct((1, tokens, config.hidden_size), jnp.bfloat16))
    positions = everywhere(jax.ShapeDtypeStruct((1, tokens), jnp.int32))
    weights = jax.tree.map(shape_on, layer_weights(config), param_shardings(config, mesh)["layers"][0])
    step = functools.partial(layer_prefill, config, config.windows[0], mesh=layout.mesh)
    return step, (weights, hidden, positions)


def compile_steps(
    targets: Sequence[str], methods: Mapping[str, Part], tokens: int = 32768, over: int = 4
) -> tuple[list[Result], dict[str, str]]:
    """A decode step through each method's cache, and its refresh, for every target.

    The step on one device, with heads over several, and with slots over as many where the method can be cut so.
    """
    results, missing = [], {}
    for target in targets:
        try:
            for method in methods.values():
                results.append(compile_step(method, target, tokens))
                results += [compile_step(method, target, tokens, over, axis) for axis in axes_of(method)]
                results.append(compile_refresh(method, target, tokens))
        except NoCompiler as reason:
            missing[target] = str(reason)
    return results, missing


def compile_whole(
    targets: Sequence[str], tokens: int = 32768, chunk: int = 2048, methods: Sequence[str] = METHODS
) -> tuple[list[Result], dict[str, str]]:
    """The prefill of one layer, on one device and over four, and that of a chunk behind `tokens` tokens, for every target
    whose compiler is there.

    Returns:
        What `compile_step` says of a step, of each program; and the reasons of targets that were left out.
    """
    results, missing = [], {}
    chunks = {}
    for spec in methods:
        name = f"chunk of {chunk} behind {tokens} tokens, one layer, {spec}"
        chunks[name] = functools.partial(reading_program, as_method(spec), LLAMA_8B, tokens, chunk)
    for target in targets:
        prefills = {f"prefill of one layer of Llama 3.1 8B, B=1, T={tokens}" + of_devices(over, "model"):
                    functools.partial(prefill_program, target, tokens, over) for over in (1, 4)}
        try:
            results += [program_facts(name, target, program) for name, program in (prefills | chunks).items()]
        except NoCompiler as reason:
            missing[target] = str(reason)
    return results, missing
