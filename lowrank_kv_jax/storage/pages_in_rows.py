"""Tokens of which steps read a few pages, in rows on a TPU too: there a page lies in one piece.

Kernels of GPUs and TPUs read `ChosenPages` where they lie: copied, their bytes would travel three times.

On lanes a page is a few columns of every register of its head, and to gather pages XLA would first turn all tokens into
rows, at every step. Rows of whole registers hold them as they are; rows of other widths stand behind each other, page by
page. A mesh cuts no such tokens over its axis "tokens": the pages of a step may all lie on one device.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, Shaped

from lowrank_kv_jax.storage.state import leaf, state, static

LANES, SUBLANES = 128, 8  # numbers that a TPU's memory keeps together
MOST_FLAT = 8192  # numbers of a page in one piece: XLA gathers 256 of them through memory that has room for so many


@state
class PagesInRows:
    """Tokens in rows; stands in the place of an array `[B, J, S, R]` in a segment.

    Attributes:
        rows: `[B, J, S, R]`, R a multiple of `LANES`, S of `page`.
        page: tokens that are read together, a multiple of `SUBLANES`.
    """

    rows: jax.Array = leaf("batch", "kv_heads", None, "rank", kind="coefficients")
    page: int = static()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rows.shape

    @property
    def dtype(self):
        return self.rows.dtype

    def in_rows(self) -> jax.Array:
        return self.rows

    def read_block(self, start: Int[jax.Array, ""] | int, size: int) -> Shaped[jax.Array, "B J {size} R"]:
        """Tokens `start` to `start + size`, `[B, J, size, R]`."""
        return jax.lax.dynamic_slice_in_dim(self.rows, start, size, axis=2)

    def of_pages(self, chosen: Int[jax.Array, "B U C"]) -> "ChosenPages":
        """The tokens of pages `chosen` `[B, U, C]`, U a multiple of J: not read yet."""
        return ChosenPages(self.rows, chosen, self.page)


@state
class ExactPages(PagesInRows):
    """The same of exact tokens, whose bytes are told apart."""

    rows: jax.Array = leaf("batch", "kv_heads", None, "head_dim", kind="exact")


@state
class FlatPages:
    """Tokens whose rows are no whole registers, those of a page behind each other.

    Attributes:
        flat: `[B, J, P, page * R]`, P a multiple of `SUBLANES`, page * R of `LANES`.
        page: tokens of a page.
        size: S.
    """

    flat: jax.Array = leaf("batch", "kv_heads", "chunks", None, kind="coefficients")
    page: int = static()
    size: int = static()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array `[B, J, S, R]` that it stands for."""
        batch, heads, _, width = self.flat.shape
        return batch, heads, self.size, width // self.page

    @property
    def dtype(self):
        return self.flat.dtype

    def in_rows(self) -> jax.Array:
        batch, heads, _, width = self.shape
        return self.flat.reshape(batch, heads, -1, width)[:, :, : self.size]

    def read_block(self, start: Int[jax.Array, ""] | int, size: int) -> Shaped[jax.Array, "B J {size} R"]:
        """Tokens `start` to `start + size`, `[B, J, size, R]`."""
        return jax.lax.dynamic_slice_in_dim(self.in_rows(), start, size, axis=2)

    def of_pages(self, chosen: Int[jax.Array, "B U C"]) -> Float[jax.Array, "B U S R"]:
        """The tokens of pages `chosen` `[B, U, C]`, U a multiple of J."""
        found = _taken(self.flat, chosen)
        return found.reshape(*chosen.shape[:2], -1, self.shape[3])


@state
class FlatExactPages(FlatPages):
    """The same of exact tokens."""

    flat: jax.Array = leaf("batch", "kv_heads", "chunks", None, kind="exact")


@state
class ChosenPages:
    """Pages of `PagesInRows` behind each other, read where they lie; stands in the place of `[B, U, C * page, R]`.

    Attributes:
        rows: as there.
        chosen: int32 `[B, U, C]`; what is no page of theirs holds no token, and anything is read there.
        page: tokens of a page.
    """

    rows: jax.Array = leaf("batch", "kv_heads", None, "rank", kind="coefficients")
    chosen: jax.Array = leaf("batch", "kv_heads", "chunks", kind="indices")
    page: int = static()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array that it stands for."""
        batch, units, count = self.chosen.shape
        return batch, units, count * self.page, self.rows.shape[3]

    @property
    def dtype(self):
        return self.rows.dtype

    def widened(self) -> Shaped[jax.Array, "B U _ R"]:
        """All tokens that were chosen, as an array, for kernels."""
        return self.read_block(0, self.shape[2])

    def read_block(self, start: Int[jax.Array, ""] | int, size: int) -> Shaped[jax.Array, "B U {size} R"]:
        """Tokens `start` to `start + size` of those that were chosen, `[B, U, size, R]`."""
        batch, heads, _, width = self.rows.shape
        if size == self.shape[2]:
            pages = self.rows.reshape(batch, heads, -1, self.page, width)
            return _taken(pages, self.chosen).reshape(self.shape)
        slots = start + jnp.arange(size)
        found = jnp.take(self.chosen, slots // self.page, axis=2) * self.page + slots % self.page
        return _taken(self.rows, found)


def _taken(x: jax.Array, index: jax.Array) -> jax.Array:
    """`[B, U, C, ..]` by `index` `[B, U, C]` of `[B, J, N, ..]`, each of whose heads serves U / J units."""
    batch, units, count = index.shape
    by_head = index.reshape(batch, x.shape[1], -1, *(1,) * (x.ndim - 3))
    return jnp.take_along_axis(x, by_head, axis=2, mode="clip").reshape(batch, units, count, *x.shape[3:])


_KINDS = {"exact": (ExactPages, FlatExactPages)}


def in_pages(stored: jax.Array, page: int, kind: str) -> "PagesInRows | FlatPages | None":
    """An array of tokens `[B, J, S, R]` in pages; None of a width, a page or a number of tokens that do not suit."""
    stored = jnp.asarray(stored)  # a CPU may hold it otherwise
    batch, heads, size, width = stored.shape
    whole, flat = _KINDS.get(kind, (PagesInRows, FlatPages))
    if not width or size % page:
        return None
    if width % LANES == 0 and page % SUBLANES == 0:
        return whole(stored, page)
    if page * width % LANES or page * width > MOST_FLAT:
        return None
    pages = stored.reshape(batch, heads, size // page, page * width)
    return flat(jnp.pad(pages, ((0, 0), (0, 0), (0, -(size // page) % SUBLANES), (0, 0))), page, size)
