"""Decode time of group latents beside its floor, and what learning adds to prefill and to decoding."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.evals.speed.machine_rates import rate_contenders, rates
from lowrank_kv_jax.evals.speed.roofline import white_bases
from lowrank_kv_jax.evals.speed.timing import CacheContender, DecodeContender, alternate
from lowrank_kv_jax.evals.studies.cross_layer.cost import attention_flops
from lowrank_kv_jax.evals.studies.streaming.quality import with_prefill
from lowrank_kv_jax.generation.forward import DEFAULT_BLOCK, prefill
from lowrank_kv_jax.method.accounting import cache_bytes
from lowrank_kv_jax.methods.parse import parse_method

LAYERS = "sliding-window:budget=1,keep=none"
"""The layers of the model with next to nothing to attend to."""


@dataclasses.dataclass(frozen=True)
class Speed:
    """Medians over rounds in which all alternate, seconds a decode step, refreshes included.

    Attributes:
        floor: no step takes less: the larger of the attention's FLOPs over this machine's rate of products and the
            cache's bytes over its rate of reading, and the layers without attention.
    """

    spec: str
    step: float
    floor: float
    cache_bytes: int


def streaming_speed(
    model: Any, specs: tuple[str, ...], length: int, rank: float, *, steps: int = 2 * DEFAULT_BLOCK, rounds: int = 3,
    dtype: str = "float32",
) -> list[Speed]:
    """Time decoding after a prompt of `length` random tokens.

    Bases have the shapes that calibration gives and no other meaning: time does not depend on what they hold.

    Args:
        specs: group latents of one rank, and others whose floor then means nothing.
        rank: share of the width, for the floor.
        steps: of a round; whole blocks, so that every method refreshes as often as it would for ever.
    """
    config, contenders, sizes = model.config, {}, {}
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (1, length))
    for spec in (*specs, LAYERS):
        method = parse_method(spec)
        bases = white_bases(config.attention, method, dtype)
        prompt = jnp.asarray(tokens[:, :32] if spec == LAYERS else tokens, jnp.int32)
        cache, logits = prefill(method, config, model.params, prompt, bases=bases, capacity=prompt.shape[1] + steps,
                                dtype=dtype)
        sizes[spec] = cache_bytes(cache, bases).total
        contenders[spec] = DecodeContender(model, cache, logits, steps, bases)
    times = alternate(contenders | rate_contenders(), steps, rounds)
    layers = 1 / times[LAYERS].decode_tokens_per_s
    width = rank * config.kv_heads * config.head_dim
    flops, (products, copies) = attention_flops(config.attention, length, width, width), rates(times)
    return [
        Speed(spec, 1 / times[spec].decode_tokens_per_s, max(flops / products, sizes[spec] / copies) + layers,
              sizes[spec])
        for spec in specs
    ]


def prefill_specs(rank: float) -> list[str]:
    """The full cache, Palu, and both forms with and without their updates; the papers' prefill last."""
    palu, coupled = f"palu:rank={rank}", f"streamingkv:rank={rank}"
    printed, still = f"streamingkv:paper,rank={rank},rank_by=uniform", "eta=0,eta_dec=0"
    forms = [palu, f"{printed},{still}", printed, f"{coupled},{still}", coupled]
    return ["full", *forms, *with_prefill(forms, "compressed")]


@dataclasses.dataclass(frozen=True)
class EndToEnd:
    """One prompt and its answer (StreamingKV, table 9), medians over rounds in which all alternate.

    Attributes:
        prefill: seconds to the first token, of each round.
        decode: seconds of the steps after it, refreshes included, of each round.
        length, steps: tokens of the prompt and of the answer.
    """

    spec: str
    prefill: tuple[float, ...]
    decode: tuple[float, ...]
    length: int
    steps: int

    @property
    def medians(self) -> tuple[float, float]:
        """Seconds of the prefill and of the decoding."""
        return float(np.median(self.prefill)), float(np.median(self.decode))


def end_to_end(
    model: Any, specs: Sequence[str], length: int, *, steps: int = DEFAULT_BLOCK, rounds: int = 3, dtype: str = "float32",
) -> list[EndToEnd]:
    """Time prefill and decoding of prompts of `length` random tokens, in bases of the shapes that calibration gives.

    Args:
        steps: decoded after the prompt.

    Raises:
        ValueError: a prompt and an answer that the model's context does not hold.
    """
    config, contenders = model.config, {}
    if length + steps > config.context:
        raise ValueError(f"length={length}: with {steps} decoded tokens more than the context of {config.context}")
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (1, length))
    for spec in specs:
        method = parse_method(spec)
        bases = white_bases(config.attention, method, dtype)
        contenders[spec] = CacheContender(model, method, bases, tokens, steps, dtype=dtype)
    times = alternate(contenders, steps, rounds)
    return [EndToEnd(spec, times[spec].first, times[spec].decode, length, steps) for spec in specs]
