"""Prompts that are read in chunks between two blocks of those in flight, in a cache of their own until they are read."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.generation.chunks import read_chunk, settled
from lowrank_kv_jax.generation.forward import begin_prefill, logits_of, refresh
from lowrank_kv_jax.generation.generate import width_of_turn
from lowrank_kv_jax.method import Layout
from lowrank_kv_jax.method.accounting import bytes_on_devices
from lowrank_kv_jax.method.cache import Cache
from lowrank_kv_jax.serving.requests import Answer
from lowrank_kv_jax.serving.shelf import Ids
from lowrank_kv_jax.storage.sharding import shard_rows


class Filling:
    """Requests on their way into rows; mutable.

    Args:
        parts: method, config, params and bases.
        layout: of as many rows as are filled at a time.
        chunk: tokens that are read at a time.
        slots, answers: rows that they will sit in, and whose they are.
        kept: rows that hold the prefix already, if there is one.
        keep: called with the rows of a prefix once they hold it.
    """

    def __init__(
        self, parts: Any, layout: Layout, chunk: int, slots: Sequence[int], answers: Sequence[Answer],
        kept: Cache | None = None, keep: Callable[[Cache], None] = lambda cache: None,
    ):
        self.parts, self.layout, self.chunk = parts, layout, min(chunk, layout.prompt)
        self.slots, self.answers, self.cache = list(slots), list(answers), kept
        prefix, rest = answers[0].prefix, [answer.prompt for answer in answers]
        self._steps = self._read(prefix, rest, chunk, keep)
        self._last: Any = None

    @property
    def bytes(self) -> int:
        """Of its cache, as far as there is one."""
        return 0 if self.cache is None else bytes_on_devices(self.cache)

    def step(self) -> jax.Array | None:
        """Read one chunk more; logits `[B, V]` at the last tokens once all are read."""
        if next(self._steps, None) is not None:
            return None
        return logits_of(self.parts.config, self.parts.params, self._last)[:, 0]

    def _read(self, prefix: Ids, prompts: Sequence[Ids], turn: int, keep: Callable[[Cache], None]) -> Iterator[bool]:
        """A step a chunk: the prompts, or the prefix and then what follows it."""
        parts, fresh = self.parts, self.cache is None
        if fresh:
            for _ in self._prefill([prefix] if prefix else prompts):
                yield True
        if not prefix:
            return
        if fresh:
            assert self.cache is not None
            self.cache = refresh(parts.method, self.cache, bases=parts.bases)
            keep(self.cache)
            yield True
        size = width_of_turn(len(prompts[0]), turn, self.layout.block)
        for begin in range(0, len(prompts[0]), size):
            if begin:
                yield True
            self._chunk([prompts[0][begin : begin + size]], size, of_prompt=False)

    def _prefill(self, prompts: Sequence[Ids]) -> Iterator[None]:
        """The first chunk, and the others; a step before each but the first."""
        parts, size = self.parts, self.chunk
        longest = max(map(len, prompts))
        tokens, _ = self._padded([ids[:size] for ids in prompts], size)
        # counted by themselves: padded to the longest, every length of prompts would compile a copy to the device
        counts = [*map(len, prompts), *[1] * (self.layout.batch - len(prompts))]
        tokens, lengths = shard_rows(self.layout.mesh, tokens, jnp.asarray(counts, jnp.int32))
        self.cache, self._last = begin_prefill(
            parts.method, parts.config, parts.params, self.layout, tokens, lengths, bases=parts.bases,
            goes_on=longest > size,
        )
        for begin in range(size, longest, size):
            yield
            self._chunk([ids[begin : begin + size] for ids in prompts], size, of_prompt=True)
        if longest > size:
            assert self.cache is not None
            self.cache = settled(self.cache, size)

    def _chunk(self, rows: Sequence[Ids], size: int, *, of_prompt: bool) -> None:
        parts = self.parts
        tokens, counts = self._padded(rows, size)
        self.cache, self._last = read_chunk(
            parts.method, parts.config, parts.params, self.cache, tokens, counts, self._last, bases=parts.bases,
            of_prompt=of_prompt,
        )

    def _padded(self, rows: Sequence[Ids], width: int) -> tuple[jax.Array, jax.Array]:
        tokens, counts = np.zeros((self.layout.batch, width), np.int32), np.zeros((self.layout.batch,), np.int32)
        for i, ids in enumerate(rows):
            tokens[i, : len(ids)], counts[i] = ids, len(ids)
        return jnp.asarray(tokens), jnp.asarray(counts)


def filling_bytes(parts: Any, layout: Layout, chunk: int) -> int:
    """Of the rows that are being filled, of a layout."""
    tokens = jnp.zeros((layout.batch, min(chunk, layout.prompt)), jnp.int32)
    lengths = jnp.ones((layout.batch,), jnp.int32)
    shape = jax.eval_shape(lambda: begin_prefill(
        parts.method, parts.config, parts.params, layout, tokens, lengths, bases=parts.bases, goes_on=True)[0])
    return bytes_on_devices(shape)
