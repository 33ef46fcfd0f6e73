"""A benchmark's questions as a suite, its answers as records.

Records are written one by one as they are known, and a run that was interrupted goes on where it stopped:
batches are formed in the same way again, so that what is computed anew is what would have been computed then.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

from lowrank_kv_jax.calibration.corpus import Corpus, load_corpus
from lowrank_kv_jax.checks.bounds import check_int
from lowrank_kv_jax.checks.models import weights_dtype
from lowrank_kv_jax.evals.asking.ask import Asker, Reply
from lowrank_kv_jax.evals.asking.batches import SHAPES, Batch, make_batches
from lowrank_kv_jax.evals.asking.methods import bases_of, calibration_settings, check_methods, conditions_of
from lowrank_kv_jax.evals.asking.prompts import PROTOCOLS, STYLES, Question
from lowrank_kv_jax.evals.results.records import append_record, make_record
from lowrank_kv_jax.evals.results.resume import Key, finished, key_of
from lowrank_kv_jax.evals.results.sizes import size_fields
from lowrank_kv_jax.method import Part
from lowrank_kv_jax.progress import ProgressBar
from lowrank_kv_jax.storage.cache_dtype import default_cache_dtype

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
        dtype: of the caches; None is the library's default.
        settings: whatever else decides the results; kept in every record and compared when a run goes on.
        prefill_chunk: `chunk` of `prefill`.
        shapes: one of `SHAPES`, of the buffers that contexts are padded to.
        block: `block` of `prefill`, for all methods; None: each has its own.
        draft: other methods read what the full cache answers, a block at a time, and decode from where they differ: the
            same answers but for rounding, sooner, and not timed.
    """

    command: str
    questions: tuple[Question, ...]
    protocol: str = PROTOCOLS[0]
    style: str = STYLES[0]
    seed: int = 0
    rows: int = 5
    dtype: str | None = None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    prefill_chunk: int | None = None
    draft: bool = False
    shapes: str = "few"
    block: int | None = None

    def __post_init__(self):
        if self.protocol not in PROTOCOLS:
            raise ValueError(f"protocol={self.protocol!r}: must be {' or '.join(PROTOCOLS)}")
        if self.style not in STYLES:
            raise ValueError(f"style={self.style!r}: must be {' or '.join(STYLES)}")
        if self.shapes not in SHAPES:
            raise ValueError(f"shapes={self.shapes!r}: must be {' or '.join(SHAPES)}")
        if self.rows < 1:
            raise ValueError(f"rows={self.rows}: must be at least 1")
        if self.block is not None:
            check_int("block", self.block, 1)
        if not self.questions:
            raise ValueError(f"{self.command}: there is nothing to ask")

    @property
    def cache_dtype(self) -> str:
        return self.dtype or default_cache_dtype()

    def conditions(self, model: Any, method: Part | None) -> dict[str, Any]:
        """What a record of a method holds beside its key; records of other conditions are not this run's. The weights of
        a peer, whose method is None, are float32."""
        shapes = None if self.shapes == "few" else self.shapes
        weights = "float32" if method is None else weights_dtype(model)
        return {"style": self.style, "weights_dtype": weights, "cache_dtype": self.cache_dtype,
                "prefill_chunk": self.prefill_chunk, "shapes": shapes,
                **conditions_of({**self.settings, "block": self.block}, method)}

    def batches(self, model: Any, multiple: int = 1) -> list[Batch]:
        """Of its questions, in rows of a `multiple`.

        Raises:
            ValueError: as `make_batches`.
        """
        return make_batches(model.tokenizer, self.questions, self.protocol, self.style, self.rows, model.config.context,
                            SHAPES[self.shapes], multiple)

    def key(self, model: Any, spec: str, question: Question) -> Key:
        return (self.command, model.fingerprint, spec, question.task, question.length, question.index,
                self.protocol, self.seed)

    def wanted(self, model: Any, methods: Mapping[str, Part | None]) -> dict[Key, dict[str, Any]]:
        """The keys of this run's records, and what each of these must hold; a method of a peer is None."""
        return {self.key(model, spec, question): self.conditions(model, method) | {"prompt_sha256": question.sha256}
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
    check_methods(model, methods, suite.command)
    if suite.draft and not any(method.name == "full" for method in methods.values()):
        raise ValueError(f"draft=True: needs `full` among the methods {', '.join(methods)}, whose answers are the drafts")
    batches = suite.batches(model, 1 if mesh is None else mesh.shape.get("data", 1))
    known = {} if json is None else finished(json, suite.wanted(model, methods))
    pending = [(batch, left) for batch in batches if (left := _left(model, methods, suite, batch, known))]
    if pending:
        needed = {spec: method for spec, method in methods.items()
                  if any(spec in left for _, left in pending)}
        asker = Asker(model, dict(bases(needed)) if bases else {}, suite.cache_dtype, mesh, suite.prefill_chunk,
                      suite.draft, suite.block)
        total = sum(_prefill_work(batch) + len(left) * _answer_work(batch) for batch, left in pending)
        with ProgressBar(suite.command, total, progress) as bar:
            for batch, left in pending:
                def step(spec: str | None, batch: Batch = batch) -> None:
                    bar.advance(_prefill_work(batch) if spec is None else _answer_work(batch))

                for reply in asker.ask(batch, left, step):
                    record = _record(model, suite, methods[reply.spec], reply)
                    key = key_of(record)
                    if key in known:
                        continue
                    if json is not None:
                        append_record(json, record)
                    known[key] = record
    return [known[suite.key(model, spec, question)] for question in suite.questions for spec in methods]


def evaluate_calibrated(
    model: Any, methods: Mapping[str, Part], suite: Suite, calibrate: Corpus | None = None, *,
    json: str | os.PathLike | None = None, progress: bool = False, mesh: Any = None,
) -> list[dict[str, Any]]:
    """`evaluate` with bases that are fitted to a corpus, by default the first half of Python's language reference."""
    corpus = calibrate or load_corpus("pydoc:first")
    settings = {**suite.settings, **calibration_settings(corpus, methods)}
    return evaluate(
        model, methods, dataclasses.replace(suite, settings=settings), json=json, progress=progress, mesh=mesh,
        bases=lambda needed: bases_of(model, needed, corpus, dtype=suite.dtype, progress=progress),
    )


def _left(model, methods, suite: Suite, batch: Batch, known) -> dict[str, Part]:
    """The methods that a batch still needs, and the one whose answers are their drafts."""
    left = {
        spec: method for spec, method in methods.items()
        if any(suite.key(model, spec, question) not in known for question in batch.all_questions)
    }
    drafting = {spec: method for spec, method in methods.items() if method.name == "full"} if suite.draft and left else {}
    return {**drafting, **left}


def _prefill_work(batch: Batch) -> float:
    """In thousands of prefilled tokens; only the progress bar depends on it."""
    return len(batch.contexts) * batch.width / 1000


def _answer_work(batch: Batch) -> float:
    return ANSWER_WORK * batch.rounds * max(q.new_tokens for q in batch.all_questions)


def _record(model: Any, suite: Suite, method: Part, reply: Reply) -> dict[str, Any]:
    question = reply.question
    return make_record(
        suite.command, model=model.name, fingerprint=model.fingerprint, method=reply.spec, task=question.task,
        length=question.length, index=question.index, samples=1, seed=suite.seed, protocol=suite.protocol,
        score=100 * question.score(reply.text), prediction=reply.text, **size_fields(reply.size), **reply.figures,
        **suite.conditions(model, method), prompt_sha256=question.sha256, **question.details,
    )
