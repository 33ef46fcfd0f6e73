"""Prompts, layer by layer, and what group latents have learned of them by their end."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.attention.spec import Taps
from lowrank_kv_jax.calibration.calibrate import iterate_taps
from lowrank_kv_jax.generation.forward import compress_group, make_layout
from lowrank_kv_jax.method import Layout, Part
from lowrank_kv_jax.progress import ProgressBar

SIDES = ("k", "v")


class Learned(NamedTuple):
    """One layer of one prompt, compressed by one method.

    Attributes:
        layout, bases, store: of this layer; `method.frame(layout.spec, bases, store)` is what it has learned, with None
            in the place of the store what it started from.
        taps: of the prompt with exact attention, a batch of one.
    """

    spec: str
    text: str
    layer: int
    method: Any
    layout: Layout
    bases: Any
    store: Any
    taps: Taps

    @property
    def tokens(self) -> tuple[jax.Array, jax.Array]:
        """Keys and values `[1, S, K, D]` that are coded."""
        return (self.taps.k_pre if self.method.rope == "pre" else self.taps.k), self.taps.v


def learned_layers(
    model: Any, methods: Mapping[str, Part], bases: Mapping[str, Any], texts: Mapping[str, np.ndarray],
    progress: bool = False,
) -> Iterator[Learned]:
    """Compress every layer of prompts that attend exactly.

    Args:
        methods: by spec, low-rank.
        bases: by spec, of those that are calibrated.
        texts: int32 tokens `[n, S]` by name.

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
    with ProgressBar("rebuilding", steps, progress) as bar:
        for text, tokens in texts.items():
            layout = make_layout(model.config, 1, tokens.shape[1], tokens.shape[1], dtype=jnp.float32)
            for window in tokens:
                for layer, taps in enumerate(iterate_taps(model.config, model.params, window[None])):
                    here = layout.of_layer(layer)
                    for spec, method in methods.items():
                        state = compress_group(method, here, own[spec][layer], (taps,),
                                               jnp.full((1,), here.prompt, jnp.int32))
                        yield Learned(spec, text, layer, method, here, own[spec][layer], state.store, taps)
                    bar.advance()
