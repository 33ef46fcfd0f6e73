"""Decode speed at several lengths, against our own full cache and, if asked for, transformers on torch."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lowrank_kv_jax.calibration.corpus import load_corpus, token_windows
from lowrank_kv_jax.evals.asking.methods import bases_of
from lowrank_kv_jax.evals.results.records import make_record
from lowrank_kv_jax.evals.speed.loop_memory import temporary_bytes
from lowrank_kv_jax.evals.speed.timing import CacheContender, Contender, Timing, alternate
from lowrank_kv_jax.generation.forward import DEFAULT_BLOCK
from lowrank_kv_jax.method import Layout, Part
from lowrank_kv_jax.method.accounting import CacheBytes, cache_bytes
from lowrank_kv_jax.saving.saved_cache import abstract_cache

PEER = "transformers"


@dataclasses.dataclass(frozen=True)
class Speed:
    """One contender at one length; `size` is None for a peer, whose leaves are not ours to count.

    Attributes:
        temporaries: bytes of `temporary_bytes`, None where they were not asked for.
    """

    name: str
    length: int
    timing: Timing
    size: CacheBytes | None
    temporaries: int | None = None


def bench_decode(
    model: Any, methods: Mapping[str, Part], lengths: Sequence[int], *, steps: int = 2 * DEFAULT_BLOCK,
    rounds: int = 3, cache_dtype: str = "float32", corpus: str = "pydoc", seed: int = 0,
    torch_model: Any = None, memory: bool = False, on_round: Callable[[int], None] = lambda length: None,
) -> list[Speed]:
    """Time prefill and decode of every contender on one prompt a length, alternating.

    Args:
        methods: by spec; calibrated ones get bases from the corpus.
        lengths: prompt tokens.
        steps: decode steps a round.
        torch_model: of `load_torch_model`, timed in the same rounds.
        memory: ask the compiler for temporaries, too: it compiles each method's loop once more.
        on_round: called after each contender's turn, the warm-up included.

    Raises:
        ValueError: a length that with the new tokens exceeds the model's context, or that the corpus cannot
            fill.
    """
    too_long = [n for n in lengths if n + steps > model.config.context]
    if too_long:
        raise ValueError(f"lengths={too_long}: with {steps} new tokens beyond the model's context, "
                         f"{model.config.context}")
    source = load_corpus(corpus)
    bases = bases_of(model, methods, source, windows=1, seed=seed, dtype=cache_dtype)
    speeds = []
    for length in lengths:
        tokens = token_windows(model.tokenizer, source.texts, length, 1, seed, name="lengths=")
        contenders: dict[str, Contender] = {
            spec: CacheContender(model, method, bases.get(spec), tokens, steps, dtype=cache_dtype)
            for spec, method in methods.items()
        }
        if torch_model is not None:
            from lowrank_kv_jax.evals.peers.transformers_decode import TransformersContender

            contenders[PEER] = TransformersContender(torch_model, tokens, steps)
        timings = alternate(contenders, steps, rounds, on_round=lambda n=length: on_round(n))
        for name, timing in timings.items():
            ours, own = methods.get(name), bases.get(name)
            if ours is None:
                speeds.append(Speed(name, length, timing, None))
                continue
            layout = Layout(model.config.attention, 1, length, length + steps, ours.default_block, cache_dtype)
            size = cache_bytes(abstract_cache(ours, layout, own), own)
            temporaries = temporary_bytes(model, ours, own, layout) if memory else None
            speeds.append(Speed(name, length, timing, size, temporaries))
    return speeds


def records(model: Any, speeds: Sequence[Speed], *, seed: int, cache_dtype: str) -> list[dict[str, Any]]:
    """One record for each contender and length, the seconds of every round included."""
    out = []
    for speed in speeds:
        size = speed.size
        sizes = {} if size is None else {
            "cache_bytes": size.total, "shared_bytes": size.shared, "full_cache_bytes": size.full,
            "bytes_per_token": size.per_token, "bytes_by_kind": size.by_kind,
        }
        if speed.temporaries is not None:
            sizes["temporary_bytes"] = speed.temporaries
        out.append(make_record(
            "bench decode", model=model.name, method=speed.name, task="decode", length=speed.length,
            samples=len(speed.timing.first), seed=seed, ttft_s=speed.timing.ttft_s,
            decode_tokens_per_s=speed.timing.decode_tokens_per_s, cache_dtype=cache_dtype,
            rounds={"first_s": speed.timing.first, "decode_s": speed.timing.decode},
            steps=speed.timing.steps, **sizes,
        ))
    return out
