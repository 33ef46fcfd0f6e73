"""Running questions through caches: one prefill of a context serves all of its questions and all methods.

Records are written one by one as they are known, and a run that was interrupted goes on where it stopped:
batches are formed in the same way again, so that what is computed anew is what would have been computed then.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

from lowrank_kv_jax.evals.asking.answer import answer
from lowrank_kv_jax.evals.asking.bases import conditions_of
from lowrank_kv_jax.evals.asking.batches import Batch, make_batches
from lowrank_kv_jax.evals.asking.clock import Clock, PrefillClock
from lowrank_kv_jax.evals.asking.few_at_a_time import drop_programs_if_many
from lowrank_kv_jax.evals.asking.prefill_many import pad_rows, prefill_many
from lowrank_kv_jax.evals.asking.prompts import PROTOCOLS, STYLES, Question
from lowrank_kv_jax.evals.results.records import append_record, make_record
from lowrank_kv_jax.evals.results.resume import Key, finished, key_of
from lowrank_kv_jax.evals.results.sizes import Size, size_of
from lowrank_kv_jax.method import Part
from lowrank_kv_jax.method.cache import Cache, fork
from lowrank_kv_jax.progress import ProgressBar

ANSWER_WORK = 0.02  # an answer's share of the work, in thousands of prefilled tokens for each new token


@dataclasses.dataclass(frozen=True)
class Suite:
    """What is asked, and under which conditions.

    Attributes:
        command: e.g. "eval ruler".
        questions: all of them.
        protocol: one of `PROTOCOLS`.
        style: one of `STYLES`.
        seed: of the questions.
        rows: contexts that share a batch.
        dtype: of the caches.
        settings: whatever else decides the results; kept in every record and compared when a run goes on.
    """

    command: str
    questions: tuple[Question, ...]
    protocol: str = PROTOCOLS[0]
    style: str = STYLES[0]
    seed: int = 0
    rows: int = 5
    dtype: str = "bfloat16"
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if self.protocol not in PROTOCOLS:
            raise ValueError(f"protocol={self.protocol!r}: must be {' or '.join(PROTOCOLS)}")
        if self.style not in STYLES:
            raise ValueError(f"style={self.style!r}: must be {' or '.join(STYLES)}")
        if self.rows < 1:
            raise ValueError(f"rows={self.rows}: must be at least 1")
        if not self.questions:
            raise ValueError(f"{self.command}: there is nothing to ask")

    def conditions(self, method: Part | None) -> dict[str, Any]:
        """What a record of a method holds beside its key; records of other conditions are not this run's."""
        return {"style": self.style, "cache_dtype": self.dtype, **conditions_of(self.settings, method)}

    def key(self, model: Any, spec: str, question: Question) -> Key:
        return (self.command, model.fingerprint, spec, question.task, question.length, question.index,
                self.protocol, self.seed)

    def wanted(self, model: Any, methods: Mapping[str, Part | None]) -> dict[Key, dict[str, Any]]:
        """The keys of this run's records, and what each of these must hold; a method of a peer is None."""
        return {self.key(model, spec, question): self.conditions(method) | {"prompt_sha256": question.sha256}
                for question in self.questions for spec, method in methods.items()}


def evaluate(
    model: Any, methods: Mapping[str, Part], suite: Suite, *, json: str | os.PathLike | None = None,
    bases: Callable[[Mapping[str, Part]], Mapping[str, Any]] | None = None, progress: bool = False,
    mesh: Any = None,
) -> list[dict[str, Any]]:
    """Ask every question of every method's cache.

    Args:
        model: a `LoadedModel` with a tokenizer.
        methods: by spec.
        suite: what is asked.
        json: the file that records are appended to; those it holds already are not computed again.
        bases: called, once, with the methods that still have to answer; returns the bases of the calibrated
            ones.
        progress: show a progress bar with the time that is left.
        mesh: lay contexts out over its axis "data" and kv heads over "model"; the weights must lie on it.

    Returns:
        One record for each question and method, those of an earlier run included, in the order of the
        questions.

    Raises:
        ValueError: a method that does not suit the model, a prompt beyond its context, no tokenizer, or a
            file that holds the same questions under other conditions.
    """
    if model.tokenizer is None:
        raise ValueError(f"model {model.name!r} has no tokenizer: {suite.command} needs one")
    for spec, method in methods.items():
        try:
            method.validate(model.config.attention)
        except ValueError as error:
            raise ValueError(f"{spec}: {error}") from error
    batches = make_batches(
        model.tokenizer, suite.questions, suite.protocol, suite.style, suite.rows, model.config.context
    )
    known = {} if json is None else finished(json, suite.wanted(model, methods))
    pending = [(batch, left) for batch in batches if (left := _left(model, methods, suite, batch, known))]
    if pending:
        needed = {spec: method for spec, method in methods.items()
                  if any(spec in left for _, left in pending)}
        runner = _Runner(model, suite, dict(bases(needed)) if bases else {}, mesh)
        total = sum(_work(batch, left) for batch, left in pending)
        with ProgressBar(suite.command, total, progress) as bar:
            for batch, left in pending:
                for record in runner.run(batch, left, bar):
                    key = key_of(record)
                    if key in known:
                        continue
                    if json is not None:
                        append_record(json, record)
                    known[key] = record
    return [known[suite.key(model, spec, question)] for question in suite.questions for spec in methods]


def _left(model, methods, suite: Suite, batch: Batch, known) -> dict[str, Part]:
    """The methods that a batch still needs."""
    return {
        spec: method for spec, method in methods.items()
        if any(suite.key(model, spec, question) not in known for question in batch.all_questions)
    }


def _work(batch: Batch, methods: Mapping[str, Part]) -> float:
    """In thousands of prefilled tokens; only the progress bar depends on it."""
    return len(batch.contexts) * batch.width / 1000 + len(methods) * _answer_work(batch)


def _answer_work(batch: Batch) -> float:
    return ANSWER_WORK * batch.rounds * max(q.new_tokens for q in batch.all_questions)


class _Runner:
    """Runs batches; remembers which programs are compiled, since a time that includes compiling says
    nothing."""

    def __init__(self, model: Any, suite: Suite, bases: Mapping[str, Any], mesh: Any):
        self.model, self.suite, self.bases, self.mesh = model, suite, bases, mesh
        self.warm: set[tuple[str | bool, int, int]] = set()
        self.sizes: dict[tuple[str, int, int], Size] = {}

    def run(self, batch: Batch, methods: Mapping[str, Part], bar: ProgressBar):
        """Yields the records of one batch, method by method."""
        model = self.model
        tokens, lengths = pad_rows(batch.contexts, batch.width)
        clock = PrefillClock()
        caches, _ = prefill_many(
            methods, model.config, model.params, tokens, lengths, bases=self.bases, capacity=batch.capacity,
            dtype=self.suite.dtype, mesh=self.mesh, clock=clock,
        )
        bar.advance(len(batch.contexts) * batch.width / 1000)
        twice = any(method.rereads for method in methods.values())
        layers = (twice, batch.width, batch.capacity)
        for spec, method in methods.items():
            cache = caches.pop(spec)
            shape = (spec, batch.width, batch.capacity)
            if shape not in self.sizes:
                self.sizes[shape] = size_of(cache, self.bases.get(spec))
            for turn in range(batch.rounds):
                last = turn + 1 == batch.rounds
                asked = cache if last else fork(cache)
                known = {layers, shape} <= self.warm and twice == method.rereads
                prefill_s = clock.alone(spec) if known else None
                yield from self._ask(batch, turn, spec, method, asked, prefill_s, len(methods))
            self.warm.add(shape)
            bar.advance(_answer_work(batch))
            if drop_programs_if_many():
                self.warm.clear()
        self.warm.add(layers)

    def _ask(
        self, batch: Batch, turn: int, spec: str, method: Part, cache: Cache, prefill_s: float | None,
        sharing: int
    ):
        """Asks the `turn`-th question of every context; contexts that have fewer are asked nothing that
        counts."""
        entries = [row[turn] if turn < len(row) else None for row in batch.questions]
        filler = next(entry for entry in entries if entry is not None)
        ids = [(entry or filler)[1] for entry in entries]
        clock = Clock([None if entry is None else entry[0] for entry in entries])
        texts = answer(
            method, self.model, cache, ids, max(e[0].new_tokens for e in entries if e is not None),
            bases=self.bases.get(spec), enough=clock.enough, on_fewer_rows=clock.stop,
            nonempty=[entry is not None and entry[0].nonempty for entry in entries],
        )
        size = self.sizes[spec, batch.width, batch.capacity]
        times = clock.times(prefill_s)
        for row, entry in enumerate(entries):
            if entry is not None:
                yield self._record(spec, method, entry[0], texts[row], size, times, {
                    "context_tokens": len(batch.contexts[row]), "question_tokens": len(entry[1]),
                    "answer_tokens": clock.tokens[row], "rows": len(entries),
                    "methods_sharing_prefill": sharing,
                })

    def _record(
        self, spec: str, method: Part, question: Question, text: str, size: Size, times, counts
    ) -> dict[str, Any]:
        suite, model = self.suite, self.model
        return make_record(
            suite.command, model=model.name, fingerprint=model.fingerprint, method=spec, task=question.task,
            length=question.length, index=question.index, samples=1, seed=suite.seed, protocol=suite.protocol,
            score=100 * question.score(text), prediction=text, cache_bytes=size.total,
            full_cache_bytes=size.full,
            bytes_per_token=size.per_token, bytes_by_kind=size.by_kind, smaller=size.smaller,
            nominal_smaller=size.nominal_smaller, compressed_fraction=size.compressed, **times, **counts,
            **suite.conditions(method), prompt_sha256=question.sha256, **question.details,
        )
