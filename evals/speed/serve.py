"""The same stream of requests under one budget of bytes: requests in flight, tokens a second, first tokens, answers."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from lowrank_kv_jax.calibration.corpus import load_corpus
from lowrank_kv_jax.evals.asking.methods import bases_of
from lowrank_kv_jax.evals.results.records import make_record
from lowrank_kv_jax.evals.speed.stream import Asked, make_stream, room_for
from lowrank_kv_jax.method import Part
from lowrank_kv_jax.method.accounting import full_cache_bytes, nbytes
from lowrank_kv_jax.serving import Answer, Engine, Request


@dataclasses.dataclass(frozen=True)
class Served:
    """What one method's engine did with the stream.

    Attributes:
        name: its spec.
        score: share of the right answers, 0 to 100.
        slots: rows that requests may sit in.
        bytes: in use, caches, kept prefixes and bases; shared: of these, the bases.
        full: bytes of a 16-bit full cache of the slots' tokens.
        seconds: from the first request to the end of the last, programs compiled before.
        tokens: drawn.
        in_flight, most_in_flight: requests between first token and end, on average over time and at most.
        first: seconds to each first token, from when it was asked.
    """

    name: str
    score: float
    slots: int
    bytes: int
    shared: int
    full: int
    seconds: float
    tokens: int
    in_flight: float
    most_in_flight: int
    first: tuple[float, ...]

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def ttft_s(self) -> tuple[float, float]:
        """The median, and what 95% stay below."""
        return float(np.median(self.first)), float(np.quantile(self.first, 0.95))


def bench_serve(
    model: Any, methods: Mapping[str, Part], memory: int | str, *, requests: int = 24,
    lengths: tuple[int, int] = (1024, 4096), new_tokens: int = 32, asked: int = 4, prefixes: int = 2,
    cache_dtype: str = "bfloat16", corpus: str = "pydoc", seed: int = 0,
    on_answer: Callable[[str], None] = lambda spec: None,
) -> list[Served]:
    """Serve the stream by every method, all requests asked at once.

    Contexts are prefixes: they are compressed before their question is seen. Every answer has `new_tokens` tokens, so
    that all methods draw as many.

    Args:
        methods: by spec; calibrated ones get bases from the corpus.
        memory: bytes of caches and bases.
        lengths, asked: see `make_stream`.
        prefixes: contexts that are kept, at most, and at most one of four rows.
        on_answer: called with the spec as each request ends.

    Raises:
        ValueError: contexts beyond the model's context, a budget that holds no row, an answer that failed.
    """
    _check_context(model, lengths, new_tokens)  # before contexts of that length are made
    stream = make_stream(model.tokenizer, requests, lengths, asked, seed)
    room = room_for(stream, new_tokens)
    _check_context(model, lengths, room)
    bases = bases_of(model, methods, load_corpus(corpus), seed=seed, dtype=cache_dtype)
    sizes = {"memory": memory, "prompt": lengths[1], "room": room, "prefixes": prefixes,
             "dtype": cache_dtype}
    return [serve(model, spec, Engine(model, method, bases=bases.get(spec), **sizes), stream, new_tokens, bases.get(spec),
                  on_answer) for spec, method in methods.items()]


def _check_context(model: Any, lengths: tuple[int, int], room: int) -> None:
    if lengths[1] + room > model.config.context:
        raise ValueError(f"lengths={lengths[0]} {lengths[1]}: with questions and answers more than the model's context "
                         f"of {model.config.context} tokens")


def serve(
    model: Any, spec: str, engine: Engine, stream: Sequence[Asked], new_tokens: int, bases: Any = None,
    on_answer: Callable[[str], None] = lambda spec: None,
) -> Served:
    """Serve a stream by one engine."""
    engine.warm_up()
    begin = time.perf_counter()
    answers = [engine.submit(Request(
        one.question, prefix=one.context, shared=one.shared, max_new_tokens=new_tokens, stop_at_eos=False,
    )) for one in stream]
    while engine.waiting or engine.in_flight:
        for _ in engine.step():
            on_answer(spec)
    seconds = time.perf_counter() - begin
    for answer in answers:
        if answer.finish == "fault":
            raise ValueError(f"{spec}: {answer.error}")
    right = [one.answer in (answer.text or "") for one, answer in zip(stream, answers, strict=True)]
    (slots,), layout = engine.slots, engine.layouts[0]
    shared = sum(nbytes(x) for x in jax.tree.leaves(bases))
    return Served(
        spec, 100 * float(np.mean(right)), slots, engine.bytes, shared,
        full_cache_bytes(layout.spec, slots * layout.capacity), seconds, sum(len(answer.tokens) for answer in answers),
        sum(answer.finished_s - answer.first_s for answer in answers) / seconds, most_at_once(answers),
        tuple(answer.first_s - answer.submitted_s for answer in answers),
    )


def most_at_once(answers: Sequence[Answer]) -> int:
    """The most that were between their first token and their end."""
    moments = sorted((at, step) for answer in answers for at, step in ((answer.first_s, 1), (answer.finished_s, -1)))
    return int(np.cumsum([step for _, step in moments]).max())


def records(
    model: Any, served: Sequence[Served], *, memory: int, lengths: tuple[int, int], asked: int, new_tokens: int,
    seed: int, cache_dtype: str,
) -> list[dict[str, Any]]:
    """One record for each method."""
    return [
        make_record(
            "bench serve", model=model.name, method=one.name, task="serve", length=lengths[1], samples=len(one.first),
            seed=seed, protocol="query-agnostic", score=one.score, cache_bytes=one.bytes, shared_bytes=one.shared,
            full_cache_bytes=one.full, memory=memory, lengths=list(lengths), asked=asked, new_tokens=new_tokens,
            slots=one.slots, in_flight=one.in_flight, most_in_flight=one.most_in_flight, seconds=one.seconds,
            tokens_per_s=one.tokens_per_s, ttft_s=one.ttft_s[0], ttft_95_s=one.ttft_s[1], cache_dtype=cache_dtype,
        )
        for one in served
    ]
