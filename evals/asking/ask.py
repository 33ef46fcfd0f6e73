"""The one way in which questions are put to compressed caches: one prefill of a batch's contexts serves all of its
questions and all methods."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from lowrank_kv_jax.evals.asking.answer import answer
from lowrank_kv_jax.evals.asking.batches import Batch
from lowrank_kv_jax.evals.asking.clock import Clock, PrefillClock
from lowrank_kv_jax.evals.asking.few_at_a_time import drop_programs_if_many
from lowrank_kv_jax.evals.asking.likelihood import Likelihoods
from lowrank_kv_jax.evals.asking.prefill_many import pad_rows, prefill_many
from lowrank_kv_jax.evals.asking.prompts import Question
from lowrank_kv_jax.evals.results.sizes import Size, size_of
from lowrank_kv_jax.method import Part
from lowrank_kv_jax.method.cache import Cache, fork


class Reply(NamedTuple):
    """What one method's cache answers to one question.

    Attributes:
        spec, question: the method and what it was asked.
        text: the answer, without special tokens.
        size: of the cache, one row.
        figures: times of the batch (see `Clock.times`) and counts of tokens, rows and methods, as records hold them.
    """

    spec: str
    question: Question
    text: str
    size: Size
    figures: dict[str, Any]


class Asker:
    """Asks batches; remembers which programs are compiled, since a time that includes compiling says nothing."""

    def __init__(
        self, model: Any, bases: Mapping[str, Any], dtype: Any = None, mesh: Any = None, prefill_chunk: int | None = None,
        draft: bool = False, block: int | None = None,
    ):
        """`draft`: whether what the full cache answers is what the others read first; their answers are not timed.
        `block`: of `prefill`."""
        self.model, self.bases, self.dtype, self.mesh = model, bases, dtype, mesh
        self.prefill_chunk, self.draft, self.block = prefill_chunk, draft, block
        self.warm: set[tuple[str | bool, int, int]] = set()
        self.sizes: dict[tuple[str, int, int], Size] = {}

    def ask(
        self, batch: Batch, methods: Mapping[str, Part], on_step: Callable[[str | None], None] = lambda spec: None
    ) -> Iterator[Reply]:
        """Yields the replies to one batch, method by method.

        Args:
            on_step: called with None once the contexts are prefilled, and with each method's spec once it has answered.
        """
        model, clock = self.model, PrefillClock()
        tokens, lengths = pad_rows(batch.contexts, batch.width)
        caches, _ = prefill_many(
            methods, model.config, model.params, tokens, lengths, bases=self.bases, capacity=batch.capacity,
            block=self.block, dtype=self.dtype, mesh=self.mesh, clock=clock, chunk=self.prefill_chunk,
        )
        on_step(None)
        twice = self.prefill_chunk is None and any(method.rereads for method in methods.values())
        layers = (twice, batch.width, batch.capacity)
        drafts: dict[int, list[list[int]]] = {}
        for spec, method in sorted(methods.items(), key=lambda item: item[1].name != "full"):
            cache = caches.pop(spec)
            shape, chunked = (spec, batch.width, batch.capacity), self.prefill_chunk is not None
            if shape not in self.sizes:
                self.sizes[shape] = size_of(cache, self.bases.get(spec))
            for turn in range(batch.rounds):
                last = turn + 1 == batch.rounds
                asked = cache if last else fork(cache)
                alone = chunked or (twice == method.rereads and not method.attends_codes)  # what its layers took is known
                known = {layers, shape} <= self.warm and alone
                prefill_s = clock.alone(spec) if known else None
                yield from self._turn(batch, turn, spec, method, asked, prefill_s, len(methods), drafts)
            self.warm.add(shape)
            on_step(spec)
            if drop_programs_if_many():
                self.warm.clear()
                layers = None  # compiled anew, too
        if layers is not None:
            self.warm.add(layers)

    def _turn(
        self, batch: Batch, turn: int, spec: str, method: Part, cache: Cache, prefill_s: float | None, sharing: int,
        drafts: dict[int, list[list[int]]],
    ) -> Iterator[Reply]:
        """Asks the `turn`-th question of every context; contexts that have fewer are asked nothing that counts.

        Args:
            drafts: by turn, what the full cache has answered; it adds its own.
        """
        entries = [row[turn] if turn < len(row) else None for row in batch.questions]
        filler = next(entry for entry in entries if entry is not None)
        clock = Clock([None if entry is None else entry[0] for entry in entries], self.model.tokenizer)
        likelihoods = Likelihoods(method, self.model, clock, self.bases.get(spec))
        found = answer(
            method, self.model, cache, [(entry or filler)[1] for entry in entries],
            max(entry[0].new_tokens for entry in entries if entry is not None), bases=self.bases.get(spec),
            enough=clock.enough, on_fewer_rows=clock.stop,
            nonempty=[entry is not None and entry[0].nonempty for entry in entries], on_asked=likelihoods.asked,
            drafts=drafts.get(turn) if self.draft else None,
        )
        if method.name == "full":
            drafts.setdefault(turn, found)
        texts = [self.model.tokenizer.decode(ids, skip_special_tokens=True) for ids in found]
        size, times = self.sizes[spec, batch.width, batch.capacity], clock.times(prefill_s)
        for row, entry in enumerate(entries):
            if entry is not None:
                yield Reply(spec, entry[0], texts[row], size, times | {
                    "context_tokens": len(batch.contexts[row]), "question_tokens": len(entry[1]),
                    "answer_tokens": clock.tokens[row], "rows": len(entries), "methods_sharing_prefill": sharing,
                    **likelihoods.figures(row),
                })
