"""Programs that a model runs, compiled whole for hardware that is not there: what they need beside their arguments."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lowrank_kv_jax.evals.speed.compile_chunk import reading_program
from lowrank_kv_jax.evals.speed.compile_step import compile_refresh, compile_step
from lowrank_kv_jax.evals.speed.llama_8b import LLAMA_8B, layer_weights
from lowrank_kv_jax.generation.layers import layer_prefill
from lowrank_kv_jax.method import Part
from lowrank_kv_jax.methods.parse import as_method
from lowrank_kv_jax.models.config import ModelConfig
from lowrank_kv_jax.pallas_kernels.compile_grid import Result, tried
from lowrank_kv_jax.pallas_kernels.compile_only import NoCompiler, compile_for

METHODS = ("full", "kivi:bits=4")


def prefill_program(tokens: int = 32768, config: ModelConfig = LLAMA_8B) -> tuple[Any, tuple[Any, ...]]:
    """The exact prefill of the first layer, one row of bfloat16, as a function and the shapes of its arguments."""
    shape = jax.ShapeDtypeStruct
    hidden, positions = shape((1, tokens, config.hidden_size), jnp.bfloat16), shape((1, tokens), jnp.int32)
    return functools.partial(layer_prefill, config, config.windows[0]), (layer_weights(config), hidden, positions)


def compile_steps(
    targets: Sequence[str], methods: Mapping[str, Part], tokens: int = 32768, over: int = 4
) -> tuple[list[Result], dict[str, str]]:
    """A decode step through each method's cache, on one device and over several, and its refresh, for every target."""
    results, missing = [], {}
    for target in targets:
        try:
            for method in methods.values():
                results += [compile_step(method, target, tokens, count) for count in (1, over)]
                results.append(compile_refresh(method, target, tokens))
        except NoCompiler as reason:
            missing[target] = str(reason)
    return results, missing


def compile_whole(
    targets: Sequence[str], tokens: int = 32768, chunk: int = 2048, methods: Sequence[str] = METHODS
) -> tuple[list[Result], dict[str, str]]:
    """The prefill of one layer, and that of a chunk behind `tokens` tokens, for every target whose compiler is there.

    Returns:
        Bytes that each program holds beside its arguments and results; and the reasons of targets that were left out.
    """
    results, missing = [], {}
    programs = {f"prefill of one layer of Llama 3.1 8B, B=1, T={tokens}": functools.partial(prefill_program, tokens)}
    for spec in methods:
        name = f"chunk of {chunk} behind {tokens} tokens, one layer, {spec}"
        programs[name] = functools.partial(reading_program, as_method(spec), LLAMA_8B, tokens, chunk)
    for target in targets:
        try:
            results += [tried(name, target, functools.partial(_temporaries, target, program))
                        for name, program in programs.items()]
        except NoCompiler as reason:
            missing[target] = str(reason)
    return results, missing


def _temporaries(target: str, program: Callable[[], tuple[Any, tuple[Any, ...]]]) -> dict[str, Any]:
    f, arguments = program()
    return {"temporaries": compile_for(target, f, *arguments).memory_analysis().temp_size_in_bytes}
