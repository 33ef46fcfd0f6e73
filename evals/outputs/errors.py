"""Errors of attention outputs: what a method changes inside of each layer, before errors of layers meet."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.attention.sink_logits import with_sink
from lowrank_kv_jax.attention.spec import Taps
from lowrank_kv_jax.generation.forward import embed_tokens, layer_prefill, make_layout
from lowrank_kv_jax.generation.groups import compress_group
from lowrank_kv_jax.method import Layout, Part, Place
from lowrank_kv_jax.methods import machine_of
from lowrank_kv_jax.methods.group_bases import bases_of_group
from lowrank_kv_jax.methods.parse import parse_method


def output_errors(
    model: Any, methods: Mapping[str, Part], tokens: np.ndarray, queries: int, *, bases: Mapping[str, Any], dtype: Any
) -> dict[str, np.ndarray]:
    """Compress all but the last `queries` tokens of a text and attend to them with those, in every layer.

    Every layer gets the exact input, so that errors do not build up. What follows the compressed tokens is not attended.

    Args:
        methods, bases: by spec.
        tokens: int32 `[S]`.
        dtype: of the caches, also of the full one that is compared with.

    Returns:
        By spec float64 `[L]`: the root of sum ||f^ - f||^2 / sum ||f||^2 over queries and heads, f the output of
        attention through the full cache.

    Raises:
        ValueError: queries outside of 1..S - 1, or a method that does not suit the model.
    """
    if not 1 <= queries < len(tokens):
        raise ValueError(f"queries={queries}: must lie in 1..{len(tokens) - 1} for a text of {len(tokens)} tokens")
    config, prompt = model.config, len(tokens) - queries
    exact = parse_method("full")
    of_text = functools.partial(layout_of_text, model, len(tokens), queries, dtype)
    exact_layout, layouts = of_text(exact), {spec: of_text(method) for spec, method in methods.items()}
    own = {spec: bases_of_group(method, config.attention, bases.get(spec)) for spec, method in methods.items()}
    of_exact = bases_of_group(exact, config.attention, None)
    groups = {spec: method.layer_groups(config.attention) for spec, method in methods.items()}
    pending: dict[str, list[Any]] = {spec: [] for spec in methods}
    errors: dict[str, list[float]] = {spec: [] for spec in methods}
    outputs: dict[int, jax.Array] = {}
    x, positions = embed_tokens(config, model.params, jnp.asarray(tokens, jnp.int32)[None]), jnp.arange(len(tokens))[None]
    for layer, weights in enumerate(model.params["layers"]):
        x, taps = layer_prefill(config.by_layer[layer], config.windows[layer], weights, x, positions)
        before, after = taps.part(slice(prompt)), taps.part(slice(prompt, None))
        outputs[layer] = _attend(exact, exact_layout, config.windows, (layer,), of_exact[layer], (before,), (after.q,))[0]
        for spec, method in methods.items():
            pending[spec].append((before, after.q))
            number = sum(group[-1] < layer for group in groups[spec])
            group = groups[spec][number]
            if layer == group[-1]:
                prompts, asked = zip(*pending.pop(spec), strict=True)
                found = _attend(method, layouts[spec], config.windows, group, own[spec][number], prompts, asked)
                errors[spec] += [relative(out, outputs[i]) for i, out in zip(group, found, strict=True)]
                pending[spec] = []
    return {spec: np.asarray(found) for spec, found in errors.items()}


def layout_of_text(model: Any, length: int, queries: int, dtype: Any, method: Part) -> Layout:
    """Of a cache that holds all but the last `queries` of `length` tokens, one row, with room for these."""
    return make_layout(model.config, 1, length - queries, length, min(method.default_block, queries), dtype)


def relative(found: jax.Array, exact: jax.Array) -> float:
    """Root of the summed squared difference over the summed squares."""
    found, exact = (np.asarray(x, np.float64) for x in (found, exact))
    return float(np.sqrt(np.square(found - exact).sum() / np.square(exact).sum()))


def _attend(
    method: Part, layout: Layout, windows: Sequence[int | None], group: Sequence[int], bases: Any,
    prompts: tuple[Taps, ...], queries: tuple[jax.Array, ...],
) -> list[jax.Array]:
    """Outputs `[1, T, N, D]` of each layer of a group that holds the prompts alone."""
    of_layer = layout.of_group(group)
    state = compress_group(method, of_layer, bases, prompts, jnp.asarray([layout.prompt], jnp.int32))
    return [
        _through(method, of_layer, Place(index, windows[layer]), bases, state, q, prompt.sink_logits)
        for index, (layer, prompt, q) in enumerate(zip(group, prompts, queries, strict=True))
    ]


@functools.partial(jax.jit, static_argnames=("method", "layout", "place"))
def _through(method: Part, layout: Layout, place: Place, bases: Any, state: Any, q: jax.Array, sinks: Any) -> jax.Array:
    positions = layout.prompt + jnp.arange(q.shape[1], dtype=jnp.int32)[None]
    return with_sink(machine_of(method).attend(layout, bases, state, q, positions, place), sinks).out
