"""One exact prefill of a context, compressed by any number of methods."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.evals.asking.clock import PrefillClock
from lowrank_kv_jax.generation.forward import (
    compress_group,
    last_logits,
    make_layout,
    prefill,
    read_layer,
    start_reading,
)
from lowrank_kv_jax.method import Layout, Part
from lowrank_kv_jax.method.cache import Cache
from lowrank_kv_jax.method.part import block_of
from lowrank_kv_jax.methods import machine_of
from lowrank_kv_jax.methods.group_bases import bases_of_group
from lowrank_kv_jax.models.config import ModelConfig
from lowrank_kv_jax.storage.sharding import replicate, shard_rows


def prefill_many(
    methods: Mapping[str, Part], config: ModelConfig, params: Any, tokens: jax.Array,
    lengths: jax.Array | None = None, *, bases: Mapping[str, Any], capacity: int | None = None,
    block: int | None = None, dtype: Any = None, mesh: jax.sharding.Mesh | None = None,
    clock: PrefillClock | None = None, chunk: int | None = None,
) -> tuple[dict[str, Cache], dict[str, jax.Array]]:
    """What `prefill` returns, for several methods at the price of one prefill and their compressions.

    Every layer runs once; its taps live until each method has compressed the group of layers that holds it. With `chunk`
    every method prefills by itself, since what a chunk attends to is the method's own; so do those whose prompts
    attend to their codes (`prefill=compressed`).

    Args:
        methods: by any name.
        config, params: the model.
        tokens, lengths, capacity, block, dtype, mesh, chunk: as for `prefill`.
        bases: of the calibrated methods, by the same names.
        clock: is told what took how long; a method that reads the prompt twice makes the layers slower for all.

    Returns:
        The caches and float32 logits `[B, V]` at the last token of each row, by name; methods whose prompts attend
        exactly share these.
    """
    clock = PrefillClock() if clock is None else clock
    caches, logits = {}, {}
    alone = {name: method for name, method in methods.items() if chunk is not None or method.attends_codes}
    for name, method in alone.items():
        with clock.method(name):
            caches[name], logits[name] = jax.block_until_ready(prefill(
                method, config, params, tokens, lengths, bases=bases.get(name), capacity=capacity, block=block,
                dtype=dtype, mesh=mesh, chunk=chunk,
            ))
    methods = {name: method for name, method in methods.items() if name not in alone}
    if not methods:
        return caches, logits
    layouts = {name: make_layout(config, *tokens.shape, capacity, block_of(method, block), dtype, mesh)
               for name, method in methods.items()}
    mesh = next(iter(layouts.values())).mesh
    lengths = jnp.full((tokens.shape[0],), tokens.shape[1], jnp.int32) if lengths is None else lengths
    tokens, lengths = shard_rows(mesh, tokens, lengths)
    compressors = {name: _Compressor(m, layouts[name], bases.get(name), lengths) for name, m in methods.items()}
    twice = any(method.rereads for method in methods.values())
    reading = start_reading(config, params, jnp.asarray(tokens, jnp.int32), lengths, twice=twice)
    # Dispatch is asynchronous: without waiting, the taps of many layers would be alive at once.
    for layer in range(len(params["layers"])):
        with clock.layer():
            reading, taps = jax.block_until_ready(read_layer(config, params, layer, reading))
        for name, compressor in compressors.items():
            with clock.method(name):
                compressor.take(layer, taps)
                jax.block_until_ready(compressor.states[-1:])
    caches |= {name: compressor.cache() for name, compressor in compressors.items()}
    with clock.layer():
        shared = jax.block_until_ready(last_logits(config, params, reading.x[:, : tokens.shape[1]], lengths))
    return caches, logits | dict.fromkeys(compressors, shared)


class _Compressor:
    """Collects the layers of one method's groups and compresses each group when it is complete."""

    def __init__(self, method: Part, layout: Layout, bases: Any, lengths: jax.Array):
        method.validate(layout.spec)
        self.method, self.layout, self.lengths = method, layout, lengths
        self.groups = method.layer_groups(layout.spec)
        self.bases = bases_of_group(method, layout.spec, replicate(layout.mesh, bases))
        self.pending: list[Any] = []
        self.states: list[Any] = []

    def take(self, layer: int, taps: Any) -> None:
        index = len(self.states)
        self.pending.append(taps)
        if layer == self.groups[index][-1]:
            args = (self.bases[index], tuple(self.pending), self.lengths)
            self.states.append(compress_group(self.method, self.layout.of_layer(layer), *args))
            self.pending = []

    def cache(self) -> Cache:
        # every cache owns its arrays: the next step may donate them
        length, limit = jnp.copy(self.lengths), machine_of(self.method).limit(self.layout, self.lengths)
        return Cache(tuple(self.states), length, limit, jnp.int32(0), self.method, self.layout)


def pad_rows(rows: Sequence[Sequence[int]], width: int) -> tuple[jax.Array, jax.Array]:
    """Rows of ids padded on the right to one width, and their lengths."""
    tokens = np.zeros((len(rows), width), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return jnp.asarray(tokens), jnp.asarray([len(row) for row in rows], jnp.int32)
