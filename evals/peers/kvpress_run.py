"""kvpress on the questions of a suite: the same weights, ids, protocol and score, into the same records."""

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

from lowrank_kv_jax.accounting import full_cache_bytes
from lowrank_kv_jax.evals.peers.kvpress_presses import (
    PREFIX,
    in_16_bits,
    make_press,
    parse_press,
    require_kvpress,
    stored_bytes,
    truncate,
)
from lowrank_kv_jax.evals.peers.transformers_decode import load_torch_model
from lowrank_kv_jax.evals.prompts import Question, encode
from lowrank_kv_jax.evals.records import append_record, make_record
from lowrank_kv_jax.evals.resume import finished, key_of
from lowrank_kv_jax.evals.suite import Suite
from lowrank_kv_jax.progress import ProgressBar


def evaluate_kvpress(
    model: Any, source: str, specs: Sequence[str], suite: Suite, *, json: str | os.PathLike | None = None,
    progress: bool = False,
) -> list[dict[str, Any]]:
    """Ask every question of kvpress' caches.

    Contexts are prefilled exactly and one by one in float32; what the press keeps is then stored in bfloat16, like
    our caches, and widened to be read.

    Args:
        model: our own, for its tokenizer, name and fingerprint.
        source: what it was loaded from; transformers loads the same.
        specs: see `parse_press`; their records' method is the spec behind "kvpress/".
        suite: what is asked. Its dtype must be bfloat16.
        json: records are appended to it; those that it holds are not computed again.

    Returns:
        One record for each question and press.

    Raises:
        ValueError: kvpress or torch is missing, an unknown press, or a file of another run.
    """
    for spec in specs:
        parse_press(spec)
    require_kvpress()
    names = [PREFIX + spec for spec in specs]
    wanted = suite.wanted(model, dict.fromkeys(names))
    known = {} if json is None else finished(json, wanted)
    left = [(question, spec, name) for question in suite.questions for spec, name in zip(specs, names, strict=True)
            if suite.key(model, name, question) not in known]
    if left:
        with tempfile.TemporaryDirectory() as folder, ProgressBar("kvpress", len(left), progress) as bar:
            runner = _Runner(model, source, suite, folder)
            for question, spec, name in left:
                record = runner.ask(question, spec, name) | wanted[suite.key(model, name, question)]
                known[key_of(record)] = record
                if json is not None:
                    append_record(json, record)
                bar.advance()
    return [known[suite.key(model, name, question)] for question in suite.questions for name in names]


class _Runner:
    """transformers' model, and how a question is asked of it."""

    def __init__(self, model: Any, source: str, suite: Suite, folder: str):
        self.model, self.suite = model, suite
        self.torch_model = load_torch_model(source, "float32")
        # KVzip reads the tokenizer from disk, and a chat template there would move its scores by the template's length
        tokenizer = model.tokenizer
        template, tokenizer.chat_template = tokenizer.chat_template, None
        tokenizer.save_pretrained(folder)
        tokenizer.chat_template = template
        self.torch_model.config.name_or_path = folder

    def ask(self, question: Question, spec: str, name: str) -> dict[str, Any]:
        """The record of one question."""
        import torch

        head, tail = encode(self.model.tokenizer, question, self.suite.protocol, self.suite.style)
        with torch.inference_mode():
            begin = time.perf_counter()
            cache = self._compressed(head, spec)
            marks = [time.perf_counter()]
            ids: list[int] = []
            for token in self._greedy(cache, tail, len(head), question.new_tokens):
                marks.append(time.perf_counter())
                if token in self.model.config.eos_ids:
                    break
                ids.append(token)
                if question.complete(self.model.tokenizer.decode(ids)):
                    break
        text = self.model.tokenizer.decode(ids)
        _, ratio = parse_press(spec)
        steps = len(marks) - 2
        return self._record(question, name, text, cache, len(head), len(tail)) | {
            "ttft_s": marks[1] - begin, "decode_tokens_per_s": steps / (marks[-1] - marks[1]) if steps > 0 else None,
            "nominal_smaller": ratio, "answer_tokens": len(ids),
        }

    def _compressed(self, head: Sequence[int], spec: str) -> Any:
        import torch
        from transformers import DynamicCache

        cache, press = DynamicCache(), make_press(spec)
        tokens = torch.tensor([list(head)])
        for layer in self.torch_model.model.layers:  # a mask of the sample before would be read again
            layer.self_attn.masked_key_indices = None
        if press is None:
            self.torch_model.model(input_ids=tokens, past_key_values=cache)
        else:
            with press(self.torch_model):
                self.torch_model.model(input_ids=tokens, past_key_values=cache)
        return in_16_bits(cache)

    def _greedy(self, cache: Any, tail: Sequence[int], position: int, most: int) -> Iterator[int]:
        """The tokens of an answer, and the cache left as it was before the question."""
        import torch

        lengths = [layer.keys.shape[2] for layer in cache.layers]
        ids, at = list(tail), position
        try:
            for _ in range(most):
                places = torch.arange(at, at + len(ids))[None]
                out = self.torch_model(
                    torch.tensor([ids]), past_key_values=cache, position_ids=places, logits_to_keep=1
                )
                at += len(ids)
                ids = [int(out.logits[0, -1].argmax())]
                yield ids[0]
        finally:
            truncate(cache, lengths)

    def _record(self, question: Question, name: str, text: str, cache: Any, context: int, asked: int) -> dict[str, Any]:
        """Bytes count as ours do: with room for the question and the longest answer."""
        suite, model, spec = self.suite, self.model, self.model.config.attention
        room = asked + question.new_tokens
        stored, tokens = stored_bytes(cache) + full_cache_bytes(spec, room), context + room
        full = full_cache_bytes(spec, tokens)
        return make_record(
            suite.command, model=model.name, fingerprint=model.fingerprint, method=name, task=question.task,
            length=question.length, index=question.index, samples=1, seed=suite.seed, protocol=suite.protocol,
            score=100 * question.score(text), prediction=text, cache_bytes=stored, full_cache_bytes=full,
            bytes_per_token=stored / tokens, bytes_by_kind={"exact": stored}, smaller=full / stored,
            context_tokens=context, question_tokens=asked, rows=1, **question.details,
        ) | {"device": "torch, cpu", "versions": _versions()}


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("kvpress", "torch", "transformers", "numpy")}
