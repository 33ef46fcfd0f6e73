"""kvpress on the questions of a suite: the same weights, ids, protocol and score, into the same records."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from lowrank_kv_jax.evals.asking.batches import Batch
from lowrank_kv_jax.evals.asking.clock import Clock, PrefillClock
from lowrank_kv_jax.evals.asking.prompts import Question
from lowrank_kv_jax.evals.asking.suite import Suite
from lowrank_kv_jax.evals.peers.kvpress_presses import PREFIX, make_press, parse_press, require_kvpress
from lowrank_kv_jax.evals.peers.transformers_decode import load_torch_model
from lowrank_kv_jax.evals.results.records import append_record, make_record
from lowrank_kv_jax.evals.results.resume import finished
from lowrank_kv_jax.method.accounting import full_cache_bytes
from lowrank_kv_jax.progress import ProgressBar


def evaluate_kvpress(
    model: Any, source: str, specs: Sequence[str], suite: Suite, *, json: str | os.PathLike | None = None,
    progress: bool = False, device: str | None = None,
) -> list[dict[str, Any]]:
    """Ask every question of kvpress' caches.

    Contexts are prefilled exactly in float32, once for all presses; what a press keeps is then stored in bfloat16, like
    our caches, and widened to be read.

    Args:
        model: our own, for its tokenizer, name and fingerprint.
        source: what it was loaded from; transformers loads the same.
        specs: see `parse_press`; their records' method is the spec behind "kvpress/".
        suite: what is asked. Its dtype must be bfloat16.
        json: records are appended to it; those that it holds are not computed again.
        device: of torch, by default a GPU where it sees one. Only on a CPU times are told.

    Returns:
        One record for each question and press.

    Raises:
        ValueError: kvpress or torch is missing, an unknown press, or a file of another run.
    """
    for spec in specs:
        parse_press(spec)
    require_kvpress()
    names = {spec: PREFIX + spec for spec in specs}
    wanted = suite.wanted(model, dict.fromkeys(names.values()))
    known = {} if json is None else finished(json, wanted)
    batches = suite.batches(model)
    pending = [(batch, left) for batch in batches if (left := [
        spec for spec, name in names.items()
        if any(suite.key(model, name, question) not in known for question in batch.all_questions)
    ])]
    if pending:
        total = sum(len(left) * len(batch.all_questions) for batch, left in pending)
        with tempfile.TemporaryDirectory() as folder, ProgressBar("kvpress", total, progress) as bar:
            runner = _Runner(model, source, suite, folder, device)
            for batch, left in pending:
                for question, record in runner.run(batch, left):
                    bar.advance()
                    key = suite.key(model, record["method"], question)
                    if key not in known:
                        known[key] = record | wanted[key]
                        if json is not None:
                            append_record(json, known[key])
    return [known[suite.key(model, name, question)] for question in suite.questions for name in names.values()]


class _Runner:
    """transformers' model, and how questions are asked of it."""

    def __init__(self, model: Any, source: str, suite: Suite, folder: str, device: str | None = None):
        import torch

        self.model, self.suite = model, suite
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.torch_model = load_torch_model(source, "float32").to(self.device)
        # KVzip reads the tokenizer from disk, and a chat template there would move its scores by the template's length
        tokenizer = model.tokenizer
        template, tokenizer.chat_template = tokenizer.chat_template, None
        tokenizer.save_pretrained(folder)
        tokenizer.chat_template = template
        self.torch_model.config.name_or_path = folder

    def run(self, batch: Batch, specs: Sequence[str]) -> Iterator[tuple[Question, dict[str, Any]]]:
        """The records of one batch, press by press."""
        import torch

        from lowrank_kv_jax.evals.peers.kvpress_many import press_many

        real = [row for row, asked in enumerate(batch.questions) if asked]
        clock = PrefillClock()
        with torch.inference_mode(), self.device:
            presses = {spec: make_press(spec) for spec in specs}
            pressed = [press_many(self.torch_model, batch.contexts[row], presses, clock) for row in real]
        for spec in specs:
            for turn in range(batch.rounds):
                rows = [(batch.contexts[row], held[spec], *batch.questions[row][turn])
                        for row, held in zip(real, pressed, strict=True) if turn < len(batch.questions[row])]
                yield from self._ask(spec, rows, clock.alone(spec), len(specs))

    def _ask(self, spec: str, rows: Sequence[Any], prefill_s: float, sharing: int):
        """Asks one question of every context."""
        import torch

        from lowrank_kv_jax.evals.peers.kvpress_answer import answer

        contexts, held, questions, asked = zip(*rows, strict=True)
        clock, tokenizer = Clock(questions, self.model.tokenizer), self.model.tokenizer
        ids: list[list[int]] = [[] for _ in rows]

        def take(row: int, token: int) -> bool:
            if token in self.model.config.eos_ids:
                return True
            ids[row].append(token)
            return clock.enough(row, ids[row])

        with torch.inference_mode(), self.device:
            answer(self.torch_model, held, [len(context) for context in contexts], asked, take,
                   max(question.new_tokens for question in questions), clock.stop)
        times = clock.times(prefill_s if self.device.type == "cpu" else None)
        for row, question in enumerate(questions):
            sizes = held[row].nbytes, len(contexts[row]), len(asked[row])
            text = tokenizer.decode(ids[row], skip_special_tokens=True)
            yield question, self._record(spec, question, text, *sizes) | {
                **times, "answer_tokens": clock.tokens[row], "rows": len(rows), "methods_sharing_prefill": sharing,
            }

    def _record(
        self, spec: str, question: Question, text: str, nbytes: int, context: int, asked: int
    ) -> dict[str, Any]:
        """Bytes count as ours do: with room for the question and the longest answer."""
        suite, model, attention = self.suite, self.model, self.model.config.attention
        room = asked + question.new_tokens
        stored, tokens = nbytes + full_cache_bytes(attention, room), context + room
        full = full_cache_bytes(attention, tokens)
        return make_record(
            suite.command, model=model.name, fingerprint=model.fingerprint, method=PREFIX + spec, task=question.task,
            length=question.length, index=question.index, samples=1, seed=suite.seed, protocol=suite.protocol,
            score=100 * question.score(text), prediction=text, cache_bytes=stored, full_cache_bytes=full,
            bytes_per_token=stored / tokens, bytes_by_kind={"exact": stored}, smaller=full / stored,
            nominal_smaller=parse_press(spec)[1], context_tokens=context, question_tokens=asked, **question.details,
        ) | {"device": f"torch, {_name(self.device)}", "versions": _versions()}


def _name(device: Any) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("kvpress", "torch", "transformers", "numpy")}
