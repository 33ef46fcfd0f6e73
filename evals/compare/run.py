"""The main table: what each method keeps (a needle, perplexity) and what it costs (bytes, time).

The context is compressed before the question is seen. One exact prefill of a context serves all methods, and
the caches of all samples of a length have one shape, so that nothing is compiled twice.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from lowrank_kv_jax.calibration.corpus import load_corpus, token_windows
from lowrank_kv_jax.checks.bounds import check_int
from lowrank_kv_jax.checks.models import weights_dtype
from lowrank_kv_jax.evals.asking.ask import Asker
from lowrank_kv_jax.evals.asking.batches import check_lengths, make_batches, one_shape
from lowrank_kv_jax.evals.asking.methods import bases_of, calibration_settings, check_methods, own_block
from lowrank_kv_jax.evals.asking.prompts import Question
from lowrank_kv_jax.evals.needle.grid import make_question
from lowrank_kv_jax.evals.needle.samples import RESERVE
from lowrank_kv_jax.evals.perplexity.score import Perplexity, score_many
from lowrank_kv_jax.evals.results.records import make_record
from lowrank_kv_jax.evals.results.sizes import Size, size_fields
from lowrank_kv_jax.evals.speed.timing import CacheContender, Timing, alternate
from lowrank_kv_jax.generation.forward import DEFAULT_BLOCK
from lowrank_kv_jax.method import Part
from lowrank_kv_jax.storage.cache_dtype import default_cache_dtype

PROTOCOL = "query-agnostic"

Step = Callable[[str, float], None]
"""Called when a piece of work is done: what it was, and its share of `work`."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What `compare` measures.

    Attributes:
        lengths: of the needle samples, in tokens; perplexity compresses a prefix of the shortest, or of what leaves room
            for the scored tokens in the model's context.
        samples: needles at each length.
        seed: of needles and text windows.
        calibrate, text: corpora (see `load_corpus`) to fit bases to and to measure perplexity on.
        calibration_windows: windows of the longest length that are calibrated on.
        windows, scored: texts for the perplexity, and tokens of each that are scored through the cache.
        new_tokens: of an answer at most; the right answer ends it earlier.
        rows: samples that share a batch.
        rounds, steps: timed rounds, and decode steps in each.
        timed_length: prompt and decode steps of a timed round; None: the shortest of `lengths`.
        dtype: of the caches whose quality and bytes are measured.
        timed_dtype: of the caches that are timed; None: float32 on a CPU, which has no fast bfloat16
            products, else `dtype`.
        prefill_chunk: `chunk` of `prefill`, of all caches, timed ones too.
    """

    lengths: tuple[int, ...] = (1024, 2048)
    samples: int = 8
    seed: int = 0
    calibrate: str | tuple[str, ...] = "pydoc:first"
    text: str | tuple[str, ...] = "pydoc:second"
    calibration_windows: int = 3
    windows: int = 4
    scored: int = 256
    new_tokens: int = 32
    rows: int = 4
    rounds: int = 3
    steps: int = DEFAULT_BLOCK
    timed_length: int | None = None
    dtype: str = dataclasses.field(default_factory=default_cache_dtype)
    timed_dtype: str | None = None
    prefill_chunk: int | None = None

    def __post_init__(self):
        positive = ("samples", "calibration_windows", "windows", "scored", "new_tokens", "rows", "rounds")
        for field in (*positive, "steps"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)}: must be at least 1")
        if self.prefill_chunk is not None:
            check_int("prefill_chunk", self.prefill_chunk, 1)
        if not self.lengths or min(self.lengths) <= self.steps or len(set(self.lengths)) < len(self.lengths):
            raise ValueError(f"lengths={self.lengths}: give different lengths, each above {self.steps}")
        if self.length_timed <= self.steps:
            raise ValueError(f"timed_length={self.timed_length}: must be above the {self.steps} decode steps")

    def prefix(self, context: int) -> int:
        """Tokens of a text that are compressed, in a model's context; at least half of it."""
        return min(min(self.lengths), max(context - self.scored, context // 2))

    @property
    def length_timed(self) -> int:
        return self.timed_length or min(self.lengths)

    @property
    def cache_dtype_timed(self) -> str:
        return self.timed_dtype or ("float32" if jax.default_backend() == "cpu" else self.dtype)


@dataclasses.dataclass
class Result:
    """One row of the table.

    Attributes:
        spec, method: as given, and what it parses to.
        scores: 0-100 of each needle, by length.
        size: by length.
        perplexity: of text through the cache, and `scored_size` that cache's.
        timing: at `Settings.length_timed`.
    """

    spec: str
    method: Part
    scores: dict[int, list[float]] = dataclasses.field(default_factory=dict)
    size: dict[int, Size] = dataclasses.field(default_factory=dict)
    perplexity: Perplexity | None = None
    scored_size: Size | None = None
    timing: Timing | None = None

    @property
    def needle(self) -> dict[int, float]:
        """Mean score by length."""
        return {length: float(np.mean(scores)) for length, scores in self.scores.items()}


def compare(
    model: Any, methods: Mapping[str, Part], settings: Settings = Settings(),
    on_step: Step = lambda name, done: None, progress: bool = False,
) -> list[Result]:
    """Measure every method on one model.

    Args:
        model: a `LoadedModel` with a tokenizer.
        methods: by spec, of `asking.methods.parse_methods`.
        on_step: for a progress bar; the shares add up to `work(methods, settings)`.
        progress: whether calibration shows progress of its own, in a log beside that of the steps.

    Raises:
        ValueError: lengths beyond the model's context or too short for a needle, a method that does not suit
            the model, a corpus that is too short.
    """
    _check(model, methods, settings)
    corpus = load_corpus(settings.calibrate)
    questions = {length: _questions(model, settings, length) for length in settings.lengths}
    texts, timed = _texts(model, settings)
    bases = bases_of(
        model, methods, corpus, length=max(settings.lengths), windows=settings.calibration_windows,
        seed=settings.seed, dtype=settings.dtype, progress=progress,
    )
    if bases:
        on_step("calibrated", _calibration_work(settings))
    results = {spec: Result(spec, method) for spec, method in methods.items()}
    asker = Asker(model, bases, settings.dtype, prefill_chunk=settings.prefill_chunk)
    for length in settings.lengths:
        _needles(asker, results, settings, questions[length], on_step)
    _perplexities(model, results, bases, texts, settings, on_step)
    timings = _timings(model, methods, bases, timed, settings, on_step)
    for spec, result in results.items():
        result.timing = timings[spec]
    return list(results.values())


def work(methods: Mapping[str, Part], settings: Settings) -> float:
    """The sum of the shares that `compare` reports: thousands of prefilled tokens, or what takes as long."""
    calls: list[float] = []
    if any(method.calibrated for method in methods.values()):
        calls.append(_calibration_work(settings))
    for length in settings.lengths:
        batches = math.ceil(settings.samples / settings.rows)
        calls.append(batches * (_prefill_work(settings.rows, length) + len(methods) * _ANSWER_WORK))
    calls.append(_prefill_work(settings.windows, min(settings.lengths)) + len(methods) * _SCORE_WORK)
    timed = _COMPILE_WORK + settings.rounds * _round_work(settings.length_timed)
    calls.append(_prefill_work(1, settings.length_timed) + len(methods) * timed)
    return sum(calls)


# ---- shares of the work, by measurement on two cores; only the progress bar depends on them ----------------

_ANSWER_WORK, _SCORE_WORK, _COMPILE_WORK = 2.0, 2.5, 5.0


def _prefill_work(rows: int, length: int) -> float:
    return rows * length / 1000


def _calibration_work(settings: Settings) -> float:
    return 1.2 * _prefill_work(settings.calibration_windows, max(settings.lengths))


def _round_work(length: int) -> float:
    return _prefill_work(1, length) + 0.5


# ---- the parts ---------------------------------------------------------------------------------------------


def _check(model: Any, methods: Mapping[str, Part], settings: Settings) -> None:
    check_methods(model, methods, "compare")
    check_lengths(settings.lengths, model.config.context, "lengths")
    check_lengths([settings.length_timed], model.config.context, "timed_length")


def _questions(model: Any, settings: Settings, length: int) -> list[Question]:
    """The needles of a length."""
    return [
        make_question(model.tokenizer, length, settings.seed, index, new_tokens=settings.new_tokens, reserve=RESERVE)
        for index in range(settings.samples)
    ]


def _texts(model: Any, settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that are compressed and scored, and those of the prompt that is timed."""
    text, context = load_corpus(settings.text), model.config.context
    size = min(settings.prefix(context) + settings.scored, context)
    sizes = (size, settings.windows), (settings.length_timed - settings.steps, 1)
    scored, timed = (token_windows(model.tokenizer, text.texts, *own, settings.seed, corpus=text.name) for own in sizes)
    return scored, timed


def _needles(
    asker: Asker, results: dict[str, Result], settings: Settings, questions: Sequence[Question], on_step: Step
) -> None:
    tokenizer, longest, length = asker.model.tokenizer, asker.model.config.context, questions[0].length
    rows = min(settings.rows, settings.samples)
    methods = {spec: result.method for spec, result in results.items()}

    def step(spec: str | None) -> None:
        if spec is None:
            on_step(f"needle {length}", _prefill_work(settings.rows, length))
        else:
            on_step(f"needle {length} {spec}", _ANSWER_WORK)

    for batch in make_batches(tokenizer, questions, PROTOCOL, "base", rows, longest, one_shape):
        for reply in asker.ask(batch, methods, step):
            result = results[reply.spec]
            result.size[length] = reply.size
            result.scores.setdefault(length, []).append(100 * reply.question.score(reply.text))


def _perplexities(
    model: Any, results: dict[str, Result], bases, tokens: np.ndarray, settings: Settings, on_step: Step
) -> None:
    prefix = settings.prefix(model.config.context)
    methods = {spec: result.method for spec, result in results.items()}
    found = score_many(model, methods, tokens, prefix, bases=bases, dtype=settings.dtype,
                       prefill_chunk=settings.prefill_chunk)
    on_step("text", _prefill_work(settings.windows, prefix))
    for scored in found:
        results[scored.spec].perplexity, results[scored.spec].scored_size = scored.perplexity, scored.size
        on_step(f"text {scored.spec}", _SCORE_WORK)


def _timings(model, methods, bases, tokens: np.ndarray, settings: Settings, on_step: Step) -> dict[str, Timing]:
    length, dtype = settings.length_timed, settings.cache_dtype_timed
    contenders = {
        spec: CacheContender(model, method, bases.get(spec), tokens, settings.steps, dtype=dtype,
                             chunk=settings.prefill_chunk)
        for spec, method in methods.items()
    }
    shares = [_COMPILE_WORK + _prefill_work(1, length) / len(methods)] * len(methods)  # of a round that is not timed
    return alternate(contenders, settings.steps, settings.rounds,
                     on_round=lambda: on_step("times", shares.pop() if shares else _round_work(length)))


# ---- records -----------------------------------------------------------------------------------------------


def records(model: Any, results: Sequence[Result], settings: Settings) -> list[dict[str, Any]]:
    """One record for each method and needle, and one for each method and text window."""
    corpus, prefix = load_corpus(settings.text), settings.prefix(model.config.context)
    common = {
        "model": model.name, "fingerprint": model.fingerprint, "seed": settings.seed, "protocol": PROTOCOL,
        "weights_dtype": weights_dtype(model), "cache_dtype": settings.dtype,
        "timed_cache_dtype": settings.cache_dtype_timed,
        "timed_length": settings.length_timed, "prefill_chunk": settings.prefill_chunk,
    }
    fitted_to = load_corpus(settings.calibrate)
    windows = {"windows": settings.calibration_windows, "length": max(settings.lengths)}
    out = []
    for result in results:
        assert result.timing is not None and result.perplexity is not None and result.scored_size is not None
        calibration = calibration_settings(fitted_to, {result.spec: result.method})["calibration"]
        shared = common | {
            "calibration": calibration and calibration | windows, "method": result.spec, "ttft_s": result.timing.ttft_s,
            "decode_tokens_per_s": result.timing.decode_tokens_per_s, "own_block": own_block(result.method),
        }
        for length, scores in result.scores.items():
            out += [make_record(
                "compare", **shared, **size_fields(result.size[length]), task="niah_single_1", length=length,
                samples=1, index=index, score=score,
            ) for index, score in enumerate(scores)]
        for index, row in enumerate(result.perplexity.nll):
            total = float(row.sum())
            out.append(make_record(
                "compare", **shared, **size_fields(result.scored_size), task="perplexity-stream",
                length=prefix + len(row), step=prefix, samples=1, index=index, scored_tokens=len(row),
                text={"name": corpus.name, "sha256": corpus.sha256}, nll=total if math.isfinite(total) else None,
                perplexity=math.exp(min(total / len(row), 700)) if math.isfinite(total) else None,
            ))
    return out
