"""Programs that a model runs, compiled whole for hardware that is not there: what they need beside their arguments."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lowrank_kv_jax.attention.rope import RopeSpec
from lowrank_kv_jax.generation.forward import layer_prefill
from lowrank_kv_jax.models.config import ModelConfig
from lowrank_kv_jax.models.parameters import param_table
from lowrank_kv_jax.pallas_kernels.compile_grid import Result
from lowrank_kv_jax.pallas_kernels.compile_only import NoCompiler, compile_for

LLAMA_8B = ModelConfig(
    family="llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=1, q_heads=32, kv_heads=8,
    head_dim=128, norm_eps=1e-5, rope=RopeSpec(500000.0, 128), context=131072, windows=(None,),
)
"""One layer of Llama 3.1 8B; its scaled frequencies change no shape."""


def prefill_program(tokens: int = 32768, config: ModelConfig = LLAMA_8B) -> tuple[Any, tuple[Any, ...]]:
    """The exact prefill of the first layer, one row of bfloat16, as a function and the shapes of its arguments."""
    shape = jax.ShapeDtypeStruct
    weights = jax.tree.map(lambda info: shape(info.shape, jnp.bfloat16), param_table(config)["layers"][0])
    hidden, positions = shape((1, tokens, config.hidden_size), jnp.bfloat16), shape((1, tokens), jnp.int32)
    return functools.partial(layer_prefill, config, config.windows[0]), (weights, hidden, positions)


def prefill_temporaries(target: str, tokens: int = 32768) -> int:
    """Bytes that the compiled prefill of one layer of Llama 3.1 8B holds beside its arguments and results.

    Args:
        target: one of `compile_only.TARGETS`.
        tokens: of the prompt, one row.

    Raises:
        ValueError, NoCompiler: as `compile_only.device`.
    """
    program, arguments = prefill_program(tokens)
    return compile_for(target, program, *arguments).memory_analysis().temp_size_in_bytes


def compile_whole(targets: Sequence[str], tokens: int = 32768) -> tuple[list[Result], dict[str, str]]:
    """The prefill of one layer for every target whose compiler is there; and the others' reasons."""
    results, missing, name = [], {}, f"prefill of one layer of Llama 3.1 8B, B=1, T={tokens}"
    for target in targets:
        try:
            results.append(Result(name, target, {"temporaries": prefill_temporaries(target, tokens)}))
        except NoCompiler as reason:
            missing[target] = str(reason)
        except Exception as error:  # a compiler raises what it likes
            results.append(Result(name, target, {}, " ".join(str(error).split())[:400] or type(error).__name__))
    return results, missing
