"""A chunk of a long prompt at the shape of Llama 3.1 8B: what its programs hold, by the compiler, without a weight."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lowrank_kv_jax.attention.spec import Taps
from lowrank_kv_jax.evals.speed.llama_8b import LLAMA_8B, layer_weights
from lowrank_kv_jax.generation.groups import compress_group, ingest_group
from lowrank_kv_jax.generation.layers import layer_prefill, layer_read
from lowrank_kv_jax.method import Layout, Part, Place
from lowrank_kv_jax.method.layout import layout_of
from lowrank_kv_jax.methods.compose import machine_of
from lowrank_kv_jax.methods.group_bases import bases_of_group
from lowrank_kv_jax.models.config import ModelConfig

LAYERS = 32


class ChunkMemory(NamedTuple):
    """Bytes of one row.

    Attributes:
        cache: of all layers, made for the whole prompt.
        chunk: the most that a chunk takes beside weights and cache: of attending in a layer, or of compressing a group of
            layers, temporaries, results, and what waits for the last layer of its group.
        whole: the same of the whole prompt, read as one; None where that was not compiled.
    """

    cache: int
    chunk: int
    whole: int | None


def chunk_memory(method: Part, tokens: int, chunk: int, *, whole: bool = True) -> ChunkMemory:
    """What prefilling `tokens` tokens takes, `chunk` at a time, in bfloat16, compiled for this machine's backend.

    Args:
        method: not calibrated, of groups of G layers.
        whole: compile the prefill of the whole prompt too.

    Raises:
        ValueError: a method that needs bases.
    """
    whole_model = dataclasses.replace(LLAMA_8B, num_layers=LAYERS, windows=(None,) * LAYERS)
    size = max(map(len, machine_of(method).layer_groups(whole_model.attention)))
    config = dataclasses.replace(LLAMA_8B, num_layers=size, windows=(None,) * size, context=2 * LLAMA_8B.context)
    reading, args = reading_program(method, config, tokens, chunk)
    _, bases, state, _, positions, counts = args
    layout, (_, taps, seen) = _layout(method, config, tokens), jax.eval_shape(reading, *args)
    coding = ingest_group.lower(method, layout, bases, state, (taps,) * size, (seen,) * size, positions, counts, True)
    most = _most(jax.jit(reading).lower(*args), coding, size, _bytes((taps, seen)))
    cache = _bytes(state) * LAYERS // size
    return ChunkMemory(cache, most, _whole(method, config, layout, bases, tokens) if whole else None)


def reading_program(method: Part, config: ModelConfig, tokens: int, chunk: int) -> tuple[Any, tuple[Any, ...]]:
    """A layer over a chunk behind what a cache for `tokens` tokens holds: a function and the shapes of its arguments."""
    layout = _layout(method, config, tokens)
    (bases, *_) = bases_of_group(method, config.attention, None)
    state = jax.eval_shape(lambda: _begun(method, config, layout, bases, chunk))
    shape = jax.ShapeDtypeStruct
    positions, counts = shape((1, chunk), jnp.int32), shape((1,), jnp.int32)
    x = shape((1, chunk, config.hidden_size), jnp.bfloat16)
    reading = functools.partial(layer_read, config.by_layer[0], method, layout, Place())
    return reading, (layer_weights(config), bases, state, x, positions, counts)


def _layout(method: Part, config: ModelConfig, tokens: int) -> Layout:
    return layout_of(config.attention, 1, tokens, block=method.default_block, dtype=jnp.bfloat16)


def _begun(method: Part, config: Any, layout: Layout, bases: Any, tokens: int) -> Any:
    """The state of a group behind the first chunk."""
    spec = config.attention
    one = jnp.zeros((1, tokens, spec.kv_heads, spec.head_dim), jnp.bfloat16)
    q = jnp.zeros((1, tokens, spec.q_heads, spec.head_dim), jnp.bfloat16)
    taps = Taps(q, one, one, one, None, jnp.zeros((1, spec.kv_heads, tokens)) if method.rereads else None)
    return compress_group(method, layout, bases, (taps,) * spec.num_layers, jnp.ones((1,), jnp.int32), True)


def _whole(method: Part, config: Any, layout: Layout, bases: Any, tokens: int) -> int:
    shape, spec = jax.ShapeDtypeStruct, config.attention
    x, positions = shape((1, tokens, config.hidden_size), jnp.bfloat16), shape((1, tokens), jnp.int32)
    reading = layer_prefill.lower(config.by_layer[0], None, layer_weights(config), x, positions)
    weights = layer_weights(config)
    _, taps = jax.eval_shape(lambda *args: layer_prefill(config.by_layer[0], None, *args), weights, x, positions)
    reread = shape((1, spec.kv_heads, tokens), jnp.float32) if method.rereads else None
    all_taps = (taps._replace(reread=reread),) * spec.num_layers
    coding = compress_group.lower(method, layout, bases, all_taps, shape((1,), jnp.int32))
    return _most(reading, coding, spec.num_layers, _bytes(all_taps[0]))


def _most(reading: Any, coding: Any, layers: int, taps: int) -> int:
    """Bytes of the larger of two programs, where each layer of a group leaves `taps` bytes for its last one."""
    return max(_beside(reading) + (layers - 1) * taps, _beside(coding) + layers * taps)


def _beside(lowered: Any) -> int:
    found = lowered.compile().memory_analysis()
    return found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes


def _bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def chunk_memories(
    methods: Mapping[str, Part], lengths: Sequence[int], chunk: int, *, whole: bool
) -> Iterator[tuple[str, int, ChunkMemory]]:
    """`chunk_memory` by spec and length, one after the other.

    Raises:
        ValueError: a method that is calibrated.
    """
    for spec, method in methods.items():
        if method.calibrated:
            raise ValueError(f"{spec}: is calibrated, and there is no text here; give methods without bases")
    for tokens in lengths:
        for spec, method in methods.items():
            yield spec, tokens, chunk_memory(method, tokens, chunk, whole=whole)
