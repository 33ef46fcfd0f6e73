"""Prompts, layer by layer, and what group latents have learned of them by their end."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.calibration.calibrate import iterate_taps
from lowrank_kv_jax.generation.forward import compress_group, make_layout
from lowrank_kv_jax.method import Part
from lowrank_kv_jax.progress import ProgressBar

SIDES = ("k", "v")


def of_sides(
    model: Any, methods: Mapping[str, Part], bases: Mapping[str, Any], texts: Mapping[str, np.ndarray],
    measure: Callable[..., Sequence[Any]], progress: bool = False,
) -> dict[tuple[str, str, int, str], list[Any]]:
    """Compress every layer of prompts that attend exactly, and measure keys and values.

    Args:
        methods: by spec, low-rank.
        bases: by spec, of those that are calibrated.
        texts: int32 tokens `[n, S]` by name.
        measure: called with method, spec, bases and store of a layer and the keys and values `[1, S, K, D]` that are
            coded; `method.frame(spec, bases, store)` is what it has learned, with None in the place of the store what it
            started from. Gives something of keys, and of values.

    Returns:
        What was measured, as NumPy arrays, by spec, text, layer and side: a list over the rows of the text.

    Raises:
        ValueError: a method without coefficients in bases, or one whose prompt attends to codes: these are taps of
            exact prefill.
    """
    for spec, method in methods.items():
        if not (method.rebuilds and method.per_token):
            raise ValueError(f"{spec}: codes no tokens in one basis of a layer")
        if method.attends_codes:
            raise ValueError(f"{spec}: prefill='compressed' is not what is measured here, only 'exact' is")
    own = {spec: bases.get(spec) or method.default_bases(model.config.attention) for spec, method in methods.items()}
    steps = sum(len(tokens) for tokens in texts.values()) * model.config.num_layers
    found: dict[tuple[str, str, int, str], list[Any]] = {}
    with ProgressBar("rebuilding", steps, progress) as bar:
        for text, tokens in texts.items():
            layout = make_layout(model.config, 1, tokens.shape[1], tokens.shape[1], dtype=jnp.float32)
            for window in tokens:
                for layer, taps in enumerate(iterate_taps(model.config, model.params, window[None])):
                    here, lengths = layout.of_layer(layer), jnp.full((1,), layout.prompt, jnp.int32)
                    for spec, method in methods.items():
                        known: Any = own[spec][layer]
                        store = compress_group(method, here, known, (taps,), lengths).store
                        coded = (taps.k_pre if method.rope == "pre" else taps.k), taps.v
                        measured = measure(method, here.spec, known, store, coded)
                        for side, values in zip(SIDES, measured, strict=True):
                            found.setdefault((spec, text, layer, side), []).append(jax.tree.map(np.asarray, values))
                    bar.advance()
    return found
