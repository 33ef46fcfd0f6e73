"""What a cache weighs on disk, and how long saving and loading it take beside the prefill that they spare."""

import dataclasses
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.calibration.corpus import load_corpus, token_windows
from lowrank_kv_jax.evals.asking.methods import bases_of
from lowrank_kv_jax.evals.results.records import make_record
from lowrank_kv_jax.generation.forward import DEFAULT_BLOCK, prefill
from lowrank_kv_jax.method import Part
from lowrank_kv_jax.method.accounting import CacheBytes, cache_bytes
from lowrank_kv_jax.saving.saved_cache import load_cache, save_cache

FORMS = {"plain": False, "compressed": True}
"""Ways to save, and what `save_cache` calls them."""
CALIBRATION = {"length": 512, "windows": 2}
"""Little text: what is measured are bytes and seconds, not quality."""


@dataclasses.dataclass(frozen=True)
class SaveSpeed:
    """A cache of one method and length, saved in one form; seconds of each round.

    Attributes:
        size: in memory, without the bases that all requests share, which no save holds.
        disk: bytes of all files of the save.
    """

    name: str
    length: int
    form: str
    size: CacheBytes
    disk: int
    prefill: tuple[float, ...]
    save: tuple[float, ...]
    load: tuple[float, ...]

    @property
    def medians(self) -> dict[str, float]:
        """Seconds."""
        return {f"{name}_s": float(np.median(getattr(self, name))) for name in ("prefill", "save", "load")}


def bench_saves(
    model: Any, methods: Mapping[str, Part], lengths: Sequence[int], *, rounds: int = 3, cache_dtype: str = "bfloat16",
    corpus: str = "pydoc", seed: int = 0, folder: str | os.PathLike | None = None,
    on_round: Callable[[int], None] = lambda length: None,
) -> list[SaveSpeed]:
    """Prefill, save and load one prompt a length, methods and forms alternating after a round that compiles.

    Args:
        methods: by spec; calibrated ones get bases from the corpus.
        lengths: prompt tokens; caches have room for one more block.
        folder: where the saves lie for as long as this takes; by default the system's for temporary files.
        on_round: called after each method's turn, the warm-up included.

    Raises:
        ValueError: a length beyond the model's context, or that the corpus cannot fill; OSError: a save that fails.
    """
    too_long = [n for n in lengths if n + DEFAULT_BLOCK > model.config.context]
    if too_long:
        raise ValueError(f"lengths={too_long}: with a block of {DEFAULT_BLOCK} beyond the model's context, "
                         f"{model.config.context}")
    source = load_corpus(corpus)
    bases = bases_of(model, methods, source, **CALIBRATION, seed=seed, dtype=cache_dtype)
    speeds = []
    for length in lengths:
        tokens = jnp.asarray(token_windows(model.tokenizer, source.texts, length, 1, seed, name="lengths="), jnp.int32)
        turns: dict[str, list[_Turn]] = {spec: [] for spec in methods}
        for _ in range(rounds + 1):
            for spec, method in methods.items():
                with tempfile.TemporaryDirectory(prefix="lowrank-kv-", dir=folder) as place:
                    turns[spec].append(_turn(model, method, bases.get(spec), tokens, cache_dtype, Path(place)))
                on_round(length)
        speeds += [_speed(spec, length, form, turns[spec][1:]) for spec in methods for form in FORMS]
    return speeds


@dataclasses.dataclass(frozen=True)
class _Turn:
    """What one method took in one round; by form where there are several."""

    size: CacheBytes
    prefill: float
    disk: dict[str, int]
    save: dict[str, float]
    load: dict[str, float]


def _turn(model: Any, method: Part, bases: Any, tokens: jax.Array, dtype: str, place: Path) -> _Turn:
    capacity = tokens.shape[1] + DEFAULT_BLOCK
    seconds, (cache, _) = _timed(lambda: prefill(
        method, model.config, model.params, tokens, bases=bases, capacity=capacity, dtype=dtype
    ))
    turn = _Turn(cache_bytes(cache), seconds, {}, {}, {})
    for form, compress in FORMS.items():
        path = place / form
        turn.save[form], _ = _timed(lambda p=path, c=compress: save_cache(p, cache, model, bases=bases, compress=c))
        turn.load[form], _ = _timed(lambda p=path: load_cache(p, method, model, bases=bases))
        turn.disk[form] = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return turn


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = jax.block_until_ready(call())
    return time.perf_counter() - begin, result


def _speed(name: str, length: int, form: str, turns: Sequence[_Turn]) -> SaveSpeed:
    return SaveSpeed(
        name, length, form, turns[0].size, turns[-1].disk[form], tuple(turn.prefill for turn in turns),
        tuple(turn.save[form] for turn in turns), tuple(turn.load[form] for turn in turns),
    )


def records(model: Any, speeds: Sequence[SaveSpeed], *, seed: int, cache_dtype: str) -> list[dict[str, Any]]:
    """One record for each method, length and form, the seconds of every round included."""
    return [
        make_record(
            "bench saves", model=model.name, method=speed.name, task=speed.form, length=speed.length,
            samples=len(speed.save), seed=seed, cache_dtype=cache_dtype, cache_bytes=speed.size.total,
            full_cache_bytes=speed.size.full, bytes_by_kind=speed.size.by_kind, disk_bytes=speed.disk, **speed.medians,
            rounds={"prefill_s": speed.prefill, "save_s": speed.save, "load_s": speed.load},
        )
        for speed in speeds
    ]
