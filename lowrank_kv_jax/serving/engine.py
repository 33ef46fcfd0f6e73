"""Continuous batching: requests come and go, the programs stay."""

import collections
from collections.abc import Sequence
from typing import Any

import jax

from lowrank_kv_jax.checks.bounds import check_int
from lowrank_kv_jax.checks.models import check_model
from lowrank_kv_jax.checks.shown import short
from lowrank_kv_jax.method.accounting import nbytes
from lowrank_kv_jax.method.layout import Layout
from lowrank_kv_jax.method.part import block_of
from lowrank_kv_jax.methods.parse import as_method
from lowrank_kv_jax.serving.plan import parse_bytes
from lowrank_kv_jax.serving.pool import Parts, Pool
from lowrank_kv_jax.serving.requests import Answer, Request
from lowrank_kv_jax.serving.sizes import check_parts, layouts_of, rows_of_pools
from lowrank_kv_jax.storage.sharding import check_weights, replicate, rows_together


class Engine:
    """Answers requests from compressed caches of a fixed number of rows.

        engine = lkv.serve.Engine(model, "kivi:bits=4", memory="256MiB", prompt=2048)
        answer = engine.submit(lkv.serve.Request("The KV cache is", max_new_tokens=32))
        engine.run()                                   # or engine.step(), again and again
        answer.tokens, answer.text, answer.finish

    A step prefills whole prompts into rows that are free, then decodes a block of tokens in all rows: nothing is read
    back between the tokens of a block, and no program depends on who sits where. What a request is answered depends on
    itself alone: it is what `generate` answers with this prompt width, capacity and block. Not safe to share between
    threads.

    Args:
        model: from `load_model`.
        method: how caches are compressed, or its spec.
        bases: from `calibrate`, where the method needs them.
        memory: bytes, or a text such as "256MiB", that all caches and the bases may take together, on all devices; rows
            are as many as fit.
        slots: requests in flight, of each prompt length; with `memory`, the most there may be (64). By default 8.
        prompt: tokens of the longest prompt, or of several lengths: each has rows of its own size, and a request sits in
            the shortest that it fits. Methods keep a share of this length, as of any padded prompt.
        room: tokens behind a padded prompt: the answer, and what follows a prefix.
        prefixes: rows, of each length, that keep prefixes for others to share; with `memory`, at most one of four rows
            and those that fit beyond `slots`.
        admits: prompts of each length that are prefilled in a step at the most, between two blocks of tokens of those in
            flight; None: as many as there are free rows.
        prefill_chunk: read prompts so many tokens at a time, one chunk a step of each prompt length, as `generate` does
            with the same `prefill_chunk`: those in flight wait for a chunk, not for a prompt. The rows that are being
            read lie beside the others, and take their part of `memory`.
        block: tokens between two looks at the host and two refreshes; by default as many as the method asks for.
        dtype: of the caches, `default_cache_dtype()` (bfloat16) by default.
        mesh: lay the caches out over these devices, as in `prefill`; rows come in multiples of its axis "data", which are
            prefilled together.

    Raises:
        ValueError: sizes that do not fit the model's context or the budget, a method that does not suit the model, no
            bases where it needs them.
        TypeError: neither a method nor text, or a dtype that is not floating, or that JAX would not hold (float64
            without x64).
    """

    def __init__(
        self, model: Any, method: Any, *, bases: Any = None, memory: int | str | None = None, slots: int | None = None,
        prompt: int | Sequence[int] = 1024, room: int = 256, prefixes: int = 0, admits: int | None = None,
        block: int | None = None, dtype: Any = None, mesh: jax.sharding.Mesh | None = None,
        prefill_chunk: int | None = None,
    ):
        for name, value, least in (("slots", slots, 1), ("prefixes", prefixes, 0), ("admits", admits, 1),
                                   ("prefill_chunk", prefill_chunk, 1)):
            if value is not None:
                check_int(name, value, least)
        check_model(model)
        self.memory = None if memory is None else parse_bytes("memory", memory)
        self._model, self._admits, self._together = model, admits, rows_together(mesh)
        method = as_method(method)
        layouts = layouts_of(model.config, self._together, prompt, room, block_of(method, block), dtype, mesh)
        check_weights(layouts[0].mesh, model.params)
        parts = Parts(method, model.config, model.params, replicate(layouts[0].mesh, bases))
        check_parts(parts, layouts, prefill_chunk)
        copies = 1 if mesh is None else mesh.size
        self._shared = copies * sum(nbytes(x) for x in jax.tree.leaves(bases))
        left = None if self.memory is None else self.memory - self._shared
        rows = rows_of_pools(parts, layouts, left, slots, prefixes, prefill_chunk)
        self._pools = [Pool(parts, *of_pool, prefill_chunk) for of_pool in zip(layouts, rows, strict=True)]
        self._queues: list[collections.deque[Answer]] = [collections.deque() for _ in rows]
        self._untold: list[Answer] = []  # ended in a step that raised
        self._failed: BaseException | None = None
        self._check_bytes()

    # ---- what is asked ------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> Answer:
        """Queue a request; its answer fills as steps are made.

        Raises:
            ValueError: an empty prompt, ids that are none, or more tokens than any row has room for.
        """
        if not isinstance(request, Request):
            raise ValueError(f"request={short(request)}: must be a Request")
        answer = Answer(self._model, request)
        first, total = answer.prefix or answer.prompt, len(answer.prefix) + len(answer.prompt)
        needed = total + request.max_new_tokens - 1  # the last token drawn is not cached
        for pool, queue in zip(self._pools, self._queues, strict=True):
            if len(first) <= pool.layout.prompt and needed <= pool.limit(len(first)):
                queue.append(answer)
                return answer
        pool = self._pools[-1]
        if len(first) > pool.layout.prompt:
            raise ValueError(f"{'prefix' if answer.prefix else 'prompt'} has {len(first)} tokens: this engine takes "
                             f"{pool.layout.prompt} (prompt=)")
        raise ValueError(f"max_new_tokens={request.max_new_tokens}: with {total} tokens before them {needed} must fit; "
                         f"a row takes {pool.limit(len(first))} (room=)")

    @property
    def waiting(self) -> int:
        """Requests that have no row yet."""
        return sum(map(len, self._queues))

    @property
    def in_flight(self) -> int:
        """Requests that sit in a row."""
        return sum(pool.rows.slots - len(pool.free) for pool in self._pools)

    @property
    def slots(self) -> tuple[int, ...]:
        """Rows that requests may sit in, of each prompt length."""
        return tuple(pool.rows.slots for pool in self._pools)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Of each prompt length: the shape of the rows that are filled together."""
        return tuple(pool.layout for pool in self._pools)

    @property
    def bytes(self) -> int:
        """Of all caches that exist, kept prefixes among them, and of the bases, on all devices: copies count each."""
        return self._shared + sum(pool.bytes for pool in self._pools)

    # ---- what is done -------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Compile all that requests may need, so that none waits for it; what prefixes were kept is forgotten.

        Raises:
            ValueError: a request is in flight.
        """
        if self.in_flight:
            raise ValueError(f"warm_up: {self.in_flight} requests are in flight; it must come before them")
        for pool in self._pools:
            pool.warm_up()
            pool.warm_up_chunks(self._of_all_sizes(pool))

    def _of_all_sizes(self, pool: Pool) -> list[Answer]:
        """Requests that between them need every program of prompts that are read in chunks."""
        if pool.chunk is None:
            return []
        sizes = {min(pool.layout.block << i, pool.chunk) for i in range(max(pool.chunk - 1, 1).bit_length() + 1)}
        behind = sorted({min(size, pool.limit(1) - 1) for size in sizes})  # a turn may be wider than it is long
        requests = [Request([0] * pool.layout.prompt)] + [Request([0] * size, prefix=[0]) for size in behind]
        answers = [Answer(self._model, request) for request in requests]
        return [answer for answer in answers if pool.in_chunks(answer)]

    def run(self) -> list[Answer]:
        """Steps until nothing waits and nobody is in flight; the answers that ended, in the order of their ends."""
        ended = []
        while self.waiting or self.in_flight:
            try:
                ended += self.step()
            except BaseException:
                self._untold = ended + self._untold
                raise
        return ended

    def step(self) -> list[Answer]:
        """Prefill what there are rows for, or a chunk of it, decode a block in every row that is taken; the answers that
        ended.

        Raises:
            Exception: whatever an `on_tokens` raised, once all were told; its request is cancelled, the engine goes on.
                The next step returns what ended in this one, too. After any other exception, and after Ctrl-C, there
                are no more steps.
        """
        if self._failed is not None:
            raise RuntimeError(f"this engine has failed ({self._failed!r}): make another one") from self._failed
        try:
            ended, errors = self._step()
            self._check_bytes()
        except BaseException as error:  # rows may be half filled, or be ahead of their seats: by Ctrl-C, too
            self._failed = error
            raise
        if errors:
            self._untold = ended
            raise errors[0]
        return ended

    def _step(self) -> tuple[list[Answer], list[Exception]]:
        """Who ended, and what their `on_tokens` raised."""
        errors: list[Exception] = []
        ended, self._untold = self._untold, []
        ended += [answer for pool in self._pools for answer in pool.clear()]
        for pool, queue in zip(self._pools, self._queues, strict=True):
            ended += _cancelled(queue)
            ended += self._admit(pool, queue, errors)
            if (found := pool.advance()) is not None:
                ended += self._seat(pool, *found, errors)
        for pool in self._pools:
            self._decode(pool, errors)
            ended += pool.clear()
        return ended, errors

    def _admit(self, pool: Pool, queue: collections.deque[Answer], errors: list[Exception]) -> list[Answer]:
        """Prompts into rows that are free; who is done at once."""
        ended, left = [], self._admits or len(queue)
        while left and pool.free and (group := _next(queue, min(len(pool.free), left, self._together), pool)):
            slots, left = pool.free[: len(group)], left - len(group)
            if pool.in_chunks(group[0]):
                pool.start(slots, group)
                continue
            if group[0].prefix:
                pool.open(slots[0], group[0].prefix, group[0].request.shared)
                logits = pool.extend(slots[0], group[0].prompt)
            else:
                logits = pool.prefill(slots, [answer.prompt for answer in group])
            ended += self._seat(pool, slots, group, logits, errors)
        return ended

    def _seat(
        self, pool: Pool, slots: Sequence[int], group: Sequence[Answer], logits: jax.Array, errors: list[Exception]
    ) -> list[Answer]:
        """Rows for those whose prompts they hold; who is done at once."""
        for answer, token in zip(group, pool.seat(slots, group, logits), strict=True):
            if token is None:
                answer.end("fault", f"{pool.parts.method.name}: the logits are NaN, at prefill")
            elif not answer.done:  # cancelled while it was read
                _tell(answer, answer.take([token]), errors)
        return pool.clear()

    def _decode(self, pool: Pool, errors: list[Exception]) -> None:
        """A block of tokens for every row that is taken."""
        if not pool.seats.active.any():
            return
        tokens, faults = pool.block()
        news = []
        for slot, answer in enumerate(pool.answers):
            if answer is None or answer.done:
                continue
            if slot in faults:
                answer.end("fault", f"{pool.parts.method.name}: {faults[slot]}")
            news.append((answer, answer.take([token for token in tokens[slot] if token >= 0])))
        for answer, new in news:
            _tell(answer, new, errors)

    def _check_bytes(self) -> None:
        if self.memory is not None and self.bytes > self.memory:
            raise RuntimeError(f"{self.bytes} bytes are in use, memory={self.memory}")


def _next(queue: collections.deque[Answer], most: int, pool: Pool) -> list[Answer]:
    """Who comes next: one behind a prefix, or up to so many without one that are read alike; nobody, if all wait for the
    end of a prompt that is read in chunks. Those that do not are not held back by who does."""
    first = next((i for i, answer in enumerate(queue) if pool.filling is None or not pool.in_chunks(answer)), len(queue))
    group: list[Answer] = []
    while first < len(queue) and len(group) < most and (not group or _alike(group[0], queue[first], pool)):
        group.append(queue[first])
        del queue[first]
    return group


def _alike(one: Answer, other: Answer, pool: Pool) -> bool:
    """Whether one that comes next may be read with one that comes behind it."""
    return not (one.prefix or other.prefix or other.done) and pool.in_chunks(one) == pool.in_chunks(other)


def _tell(answer: Answer, new: list[int], errors: list[Exception]) -> None:
    if answer.request.on_tokens is None or not new:
        return
    try:
        answer.request.on_tokens(answer, new)
    except Exception as error:
        answer.cancel()
        errors.append(error)


def _cancelled(queue: collections.deque[Answer]) -> list[Answer]:
    """Those that were cancelled while they waited; they wait no longer."""
    gone = [answer for answer in queue if answer.done]
    if gone:
        left = [answer for answer in queue if not answer.done]
        queue.clear()
        queue.extend(left)
    return gone
