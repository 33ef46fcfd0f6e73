"""A pool: a cache of a fixed number of rows, and who sits in them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.method import Layout, Part
from lowrank_kv_jax.method.accounting import bytes_on_devices
from lowrank_kv_jax.method.cache import Cache, take_rows
from lowrank_kv_jax.methods.compose import machine_of
from lowrank_kv_jax.models.config import ModelConfig
from lowrank_kv_jax.serving.chunked import Filling
from lowrank_kv_jax.serving.decoding import empty_seats, serve_block
from lowrank_kv_jax.serving.filling import copy_rows, extend_rows, prefill_rows, refresh_rows
from lowrank_kv_jax.serving.plan import Rows, widths_of
from lowrank_kv_jax.serving.requests import MOST_STOPS, Answer
from lowrank_kv_jax.serving.rows import empty_cache, rows_of
from lowrank_kv_jax.serving.sampling import first_tokens
from lowrank_kv_jax.serving.shelf import Ids, Shelf
from lowrank_kv_jax.storage.sharding import beside, to_host

_rows_of = jax.jit(rows_of)


class Parts(NamedTuple):
    """What all pools of an engine share."""

    method: Part
    config: ModelConfig
    params: Any
    bases: Any


class Pool:
    """Mutable shell around a cache: every method hands it to a pure function and keeps what comes back.

    Args:
        layout: of as many rows as are filled at a time.
        rows: a multiple of these.
        chunk: tokens of a prompt that are read at a time; None: all.
    """

    def __init__(self, parts: Parts, layout: Layout, rows: Rows, chunk: int | None = None):
        self.parts, self.layout, self.rows, self.chunk = parts, layout, rows, chunk
        self.widths = widths_of(layout.prompt if chunk is None else min(chunk, layout.prompt))
        self.filling: Filling | None = None
        self.shelf, self.seats = Shelf(rows.prefixes), empty_seats(rows.slots, len(parts.config.eos_ids) + MOST_STOPS)
        self.answers: list[Answer | None] = [None] * rows.slots
        self._cache, self._kept = self._empty(rows.slots), self._empty(rows.prefixes) if rows.prefixes else None

    def _empty(self, rows: int) -> Cache:
        cache = empty_cache(self.parts.method, self.layout, self.parts.bases, rows // self.layout.batch)
        return beside(cache, self.parts.params, self.parts.bases)  # as it will lie once it was filled

    @property
    def bytes(self) -> int:
        """Of every array that exists, on all devices."""
        held = sum(bytes_on_devices(cache) for cache in (self._cache, self._kept) if cache is not None)
        return held + (0 if self.filling is None else self.filling.bytes)

    @property
    def free(self) -> list[int]:
        """Rows that nobody sits in."""
        return [row for row, answer in enumerate(self.answers) if answer is None]

    def limit(self, tokens: int) -> int:
        """Tokens that a row may see whose first `tokens` ones are prefilled."""
        return int(machine_of(self.parts.method).limit(self.layout, jnp.full((1,), tokens, jnp.int32))[0])

    # ---- filling ------------------------------------------------------------------------------------------------

    def prefill(self, slots: Sequence[int], prompts: Sequence[Ids]) -> jax.Array:
        """Prompts into rows; logits `[n, V]`, those of the prompts first."""
        longest = max(map(len, prompts))
        tokens, lengths = self._padded(prompts, next(width for width in self.widths if width >= longest))
        self._cache, logits = prefill_rows(
            *self.parts[:3], self._cache, self._at(slots), tokens, np.maximum(lengths, 1), bases=self.parts.bases
        )
        return logits

    def in_chunks(self, answer: Answer) -> bool:
        """Whether a request is read in chunks: behind a prefix, and where its prompt is longer than one."""
        return self.chunk is not None and (bool(answer.prefix) or len(answer.prompt) > self.chunk)

    def start(self, slots: Sequence[int], answers: Sequence[Answer]) -> None:
        """Begin to read requests in chunks; their rows are taken from now on."""
        assert self.chunk is not None and self.filling is None
        prefix, shared = answers[0].prefix, answers[0].request.shared
        at, kept = self.shelf.find(prefix) if prefix else None, None
        if at is not None:
            assert self._kept is not None
            kept = _rows_of(self._kept, self._at([at], self.rows.prefixes))

        def keep(cache: Cache) -> None:
            place = self.shelf.place(prefix) if shared else None
            if place is not None:
                assert self._kept is not None
                self._kept = copy_rows(self._kept, self._at([place], self.rows.prefixes), cache, self._rows)

        self.filling = Filling(self.parts, self.layout, self.chunk, slots, answers, kept, keep)
        for slot, answer in zip(slots, answers, strict=True):
            self.answers[slot] = answer

    def advance(self) -> tuple[list[int], list[Answer], jax.Array] | None:
        """Read one chunk more; once all are read, the rows that hold them, whose they are, and logits."""
        if self.filling is None or (logits := self.filling.step()) is None:
            return None
        done, self.filling = self.filling, None
        assert done.cache is not None
        self._cache = copy_rows(self._cache, self._at(done.slots), done.cache, self._rows)
        return done.slots, done.answers, logits

    @property
    def _rows(self) -> np.ndarray:
        """Of what is filled at a time."""
        return np.arange(self.layout.batch, dtype=np.int32)

    def open(self, slot: int, prefix: Ids, shared: bool) -> None:
        """A prefix into a row: a copy of where it is kept, or prefilled, and kept if it is to be shared."""
        at, kept = self._at([slot]), self.shelf.find(prefix)
        if kept is not None:
            assert self._kept is not None
            self._cache = copy_rows(self._cache, at, self._kept, self._at([kept]))
            return
        self.prefill([slot], [prefix])
        self._cache = refresh_rows(self.parts.method, self._cache, at, bases=self.parts.bases)
        place = self.shelf.place(prefix) if shared else None
        if place is not None:
            assert self._kept is not None
            self._kept = copy_rows(self._kept, self._at([place], self.rows.prefixes), self._cache, at)

    def extend(self, slot: int, ids: Ids) -> jax.Array:
        """What follows a prefix, block by block; logits `[n, V]`, the row's first."""
        block, logits = self.layout.block, None
        for begin in range(0, len(ids), block):
            tokens, counts = self._padded([ids[begin : begin + block]], block)
            self._cache, logits = extend_rows(
                *self.parts[:3], self._cache, self._at([slot]), tokens, counts, bases=self.parts.bases
            )
        assert logits is not None
        return logits

    def _at(self, rows: Sequence[int], size: int | None = None) -> np.ndarray:
        """Rows, and as many that are not there as fill the layout's batch."""
        found = np.full((self.layout.batch,), self.rows.slots if size is None else size, np.int32)
        found[: len(rows)] = rows
        return found

    def _padded(self, rows: Sequence[Ids], width: int) -> tuple[np.ndarray, np.ndarray]:
        tokens, counts = np.zeros((self.layout.batch, width), np.int32), np.zeros((self.layout.batch,), np.int32)
        for i, ids in enumerate(rows):
            tokens[i, : len(ids)], counts[i] = ids, len(ids)
        return tokens, counts

    # ---- seats --------------------------------------------------------------------------------------------------

    def seat(self, slots: Sequence[int], answers: Sequence[Answer], logits: jax.Array) -> list[int | None]:
        """Give rows to those whose prompts they hold; their first tokens, None where the logits are NaN."""
        for slot, answer in zip(slots, answers, strict=True):
            self._sit(slot, answer)
        tokens = self._first(slots, [len(answer.prefix) + len(answer.prompt) for answer in answers], logits)
        self.seats.token[list(slots)] = [token or 0 for token in tokens]
        return tokens

    def _first(self, slots: Sequence[int], steps: Sequence[int], logits: jax.Array) -> list[int | None]:
        at = np.minimum(self._at(slots), self.rows.slots - 1)
        draws = type(self.seats.draws)(*(x[at] for x in self.seats.draws))
        found = first_tokens(draws, logits, self._at(steps))
        return [None if broken else int(token) for token, broken in zip(*map(to_host, found), strict=True)][: len(slots)]

    def _sit(self, slot: int, answer: Answer) -> None:
        request, seats, draws = answer.request, self.seats, self.seats.draws
        self.answers[slot] = answer
        seats.active[slot], seats.left[slot], seats.stops[slot] = True, request.max_new_tokens - 1, -1
        seats.stops[slot, : len(answer.stops)] = answer.stops
        draws.seed[slot], draws.temperature[slot], draws.top_p[slot] = request.seed, request.temperature, request.top_p
        draws.top_k[slot] = self.parts.config.vocab_size if request.top_k is None else request.top_k

    def clear(self) -> list[Answer]:
        """Rows of answers that are done are free; nobody reads what they hold. Those answers."""
        if self.filling is not None and all(answer.done for answer in self.filling.answers):
            self.filling = None
        held = () if self.filling is None else self.filling.slots  # read together, they end together
        done = [(slot, answer) for slot, answer in enumerate(self.answers)
                if answer is not None and answer.done and slot not in held]
        for slot, _ in done:
            self.answers[slot], self.seats.active[slot], self.seats.draws.temperature[slot] = None, False, 0.0
        return [answer for _, answer in done]

    def warm_up(self) -> None:
        """Run every program once, over rows that nobody sits in."""
        self.limit(1)
        for width in self.widths:
            self._first([0], [width], self.prefill([0], [(0,) * width]))
        if self.chunk is None:
            for _ in range(2):  # prefilled, and copied from where it is kept
                self.open(0, (0,), shared=True)
            self.extend(0, (0,))
        self.block()
        self.shelf = Shelf(self.rows.prefixes)

    def warm_up_chunks(self, requests: Sequence[Answer]) -> None:
        """Run the programs of these requests, over rows that nobody sits in."""
        for answer in requests:
            self.start([0], [answer])
            while (found := self.advance()) is None:
                pass
            self._first([0], [1], found[2])
            self.answers[0] = None
        self.shelf = Shelf(self.rows.prefixes)

    def block(self) -> tuple[np.ndarray, dict[int, str]]:
        """A block of steps: the tokens drawn, `[slots, block]`, -1 where none was, and what went wrong by row."""
        before = np.array(self.seats.active)
        self._cache, block = serve_block(*self.parts[:3], self._cache, self.seats, bases=self.parts.bases)
        tokens, active, broken = map(to_host, block)
        drew = (tokens >= 0).sum(axis=1)
        for slot in np.flatnonzero(drew):
            self.seats.token[slot] = tokens[slot, drew[slot] - 1]
        self.seats.left[:] -= drew
        self.seats.active[:] = active
        return tokens, self._faults(before, broken)

    def _faults(self, active: np.ndarray, broken: np.ndarray) -> dict[int, str]:
        machine = machine_of(self.parts.method)
        found = {int(slot): "the logits are NaN" for slot in np.flatnonzero(broken)}
        if machine.fault(self._cache.groups) is None:
            return found
        for slot in np.flatnonzero(active):
            own = machine.fault(take_rows(self._cache, [int(slot)]).groups)
            if own is not None:
                found.setdefault(int(slot), own)
        return found
