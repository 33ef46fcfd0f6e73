"""Tokens in rows as TPU kernels read them: all, or pages that a step has chosen, each fetched from where it lies."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from lowrank_kv_jax.pallas_kernels.dispatch import Unsupported
from lowrank_kv_jax.pallas_kernels.tpu_softmax import LANES, TILE_BYTES, Step, dot
from lowrank_kv_jax.storage.pages_in_rows import ChosenPages, PagesInRows

TOGETHER = 16  # pages of a grid step, of keys and of values
WHOLE_ROWS = 16  # of bfloat16, which a register holds
MOST_NUMBERS = 1 << 16  # of pages that a program is told: it keeps them in scalar memory


class PagedTokens(NamedTuple):
    """Tokens as arrays that a kernel reads; as `tpu_softmax.LaneTokens`.

    Attributes:
        rows: `[B, J, S, R]`.
        chosen: int32 `[B, U, C]`, pages of each unit, U a multiple of J.
        page: tokens of a page.
        column: of a row's numbers, where its pages begin.
    """

    rows: jax.Array
    chosen: jax.Array
    page: int
    column: int = 0

    @property
    def heads(self) -> int:
        return self.chosen.shape[1]

    @property
    def slots(self) -> int:
        return self.chosen.shape[2] * self.page

    @property
    def width(self) -> int:
        return self.rows.shape[3]

    @property
    def token_bytes(self) -> int:
        return self.width * self.rows.dtype.itemsize

    @property
    def least(self) -> int:
        return TOGETHER * self.page

    most_bytes = 0

    def spread(self, x: jax.Array) -> jax.Array:
        return x

    def collected(self, x: jax.Array) -> jax.Array:
        return x

    def numbers(self, rows: int) -> jax.Array:
        """Pages of each row, int32 `[rows, U * C]`."""
        return self.chosen.reshape(rows, -1)

    def arrays(self, tile: int) -> list[jax.Array]:
        return [self.rows] * TOGETHER

    def specs(self, batch: int, heads: int, tile: int, at) -> list[pl.BlockSpec]:
        shared, of_head = heads // self.heads, heads // self.rows.shape[1]
        count, last = self.chosen.shape[2], self.rows.shape[2] // self.page - 1

        def of_place(place: int) -> pl.BlockSpec:
            def where(b, h, i, table):
                number = jnp.minimum(at(i, b, table) * TOGETHER + place, count - 1)
                page = table[b, self.column + h // shared * count + number]
                return b, h // of_head, jnp.minimum(page, last), 0

            return pl.BlockSpec((None, None, self.page, self.width), where)

        return [of_place(place) for place in range(TOGETHER)]

    def tile(self, refs: list[Any], size: int) -> "Tile":
        return Tile([refs.pop(0) for _ in range(TOGETHER)])


class RowTokens(NamedTuple):
    """The same of all tokens in order.

    Attributes:
        rows: `[B, J, S, R]`.
        column: without a meaning here.
    """

    rows: jax.Array
    column: int = 0

    @property
    def heads(self) -> int:
        return self.rows.shape[1]

    @property
    def slots(self) -> int:
        return self.rows.shape[2]

    @property
    def width(self) -> int:
        return self.rows.shape[3]

    @property
    def token_bytes(self) -> int:
        return self.width * self.rows.dtype.itemsize

    least, most_bytes = LANES, TILE_BYTES

    def spread(self, x: jax.Array) -> jax.Array:
        return x

    def collected(self, x: jax.Array) -> jax.Array:
        return x

    def numbers(self, rows: int) -> jax.Array:
        return jnp.zeros((rows, 0), jnp.int32)

    def arrays(self, tile: int) -> list[jax.Array]:
        return [self.rows]

    def specs(self, batch: int, heads: int, tile: int, at) -> list[pl.BlockSpec]:
        share, shared = batch // self.rows.shape[0], heads // self.heads

        def where(b, h, i, table):
            return b // share, h // shared, at(i, b, table), 0

        return [pl.BlockSpec((None, None, tile, self.width), where)]

    def tile(self, refs: list[Any], size: int) -> "Tile":
        return Tile([refs.pop(0)])


class Tile(NamedTuple):
    """References to the pages `[page, R]` of a grid step, which `at` sets."""

    pages: list[Any]
    step: Any = None

    def at(self, step: Step) -> "Tile":
        """As `tpu_softmax.Tile.at`."""
        return self._replace(step=step)

    def of_tokens(self, factor: jax.Array, inside: jax.Array) -> jax.Array:
        """As `tpu_softmax.Tile.of_tokens`."""
        return dot(factor, self._together().astype(factor.dtype), (1, 1))

    def add_weighted(self, acc_ref, shrink: jax.Array, weights: jax.Array, inside: jax.Array) -> None:
        """As `tpu_softmax.Tile.add_weighted`."""
        data = self._together()
        slots = self.step.number * self.step.size + jax.lax.broadcasted_iota(jnp.int32, (self.step.size, 1), 0)
        data = jnp.where(slots < self.step.high, data, jnp.zeros_like(data)).astype(weights.dtype)
        acc_ref[...] = acc_ref[...] * shrink + dot(weights, data, (1, 0))

    def _together(self) -> jax.Array:
        """`[tokens, R]`; pages that are no whole registers are put together in float32."""
        pages = [ref[...] for ref in self.pages]
        if pages[0].dtype.itemsize < 4 and pages[0].shape[0] % WHOLE_ROWS:
            pages = [x.astype(jnp.float32) for x in pages]
        return jnp.concatenate(pages, axis=0) if len(pages) > 1 else pages[0]


def paged_tokens(tokens: Any) -> PagedTokens | RowTokens | None:
    """The buffers behind keys or values; None of another storage.

    Raises:
        Unsupported: more pages than scalar memory holds, or a dtype that the kernels do not read.
    """
    if not isinstance(tokens, ChosenPages | PagesInRows):
        return None
    if tokens.rows.dtype.name not in ("float32", "bfloat16"):
        raise Unsupported(f"pages of dtype {tokens.rows.dtype.name}, allowed are float32, bfloat16")
    if isinstance(tokens, PagesInRows):
        return RowTokens(tokens.rows)
    if tokens.chosen.size > MOST_NUMBERS:
        raise Unsupported(f"{tokens.chosen.size} pages of all heads and rows: scalar memory is for {MOST_NUMBERS}")
    return PagedTokens(tokens.rows, tokens.chosen, tokens.page)
