"""How coded tokens lie in memory: as rows `[S, R]`, or on the lanes of a TPU, `[R, S]`.

A TPU's registers hold 128 numbers a row. Tokens of rank 32 in rows fill a quarter of them, so XLA lays such a buffer out
the other way round for a kernel, and copies all of it at every call. Kept transposed, nothing is copied; `compress`
and `refresh`, which methods write for rows, pay for it with a transposition each.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, Shaped

from lowrank_kv_jax.storage.on_host import OnHost
from lowrank_kv_jax.storage.packed import PackedTokens
from lowrank_kv_jax.storage.pages_in_rows import FlatPages, PagesInRows, in_pages
from lowrank_kv_jax.storage.quantised import COEFFICIENTS, QuantisedTokens, widen_scales
from lowrank_kv_jax.storage.state import LeafInfo, leaf, state, static, write_tokens
from lowrank_kv_jax.storage.tiles_on_lanes import in_tiles_on_lanes, tiles_on_lanes
from lowrank_kv_jax.storage.water_filled import WaterFilled, WidthRuns, bytes_of, components_of, pack

LANES = 128  # of a register: arrays whose last axis is no multiple XLA keeps the other way round, and copies for a kernel
PACKED_ROWS = 8  # bytes that a TPU's memory keeps together: of a number that is no multiple XLA would copy the buffer
TOKEN_LAYOUTS = ("rows", "lanes")


@state
class TokensOnLanes:
    """Tokens, transposed; stands in the place of an array `[B, J, S, R]` in a segment.

    Attributes:
        on_lanes: `[B, J, R, S']`, S' a multiple of `LANES`.
        size: S.
    """

    on_lanes: jax.Array = leaf("batch", "kv_heads", "rank", "tokens", kind="coefficients")
    size: int = static()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array that it stands for."""
        batch, heads, rank, _ = self.on_lanes.shape
        return batch, heads, self.size, rank

    def in_rows(self) -> jax.Array:
        return self.on_lanes[..., : self.size].swapaxes(2, 3)

    @property
    def dtype(self):
        return self.on_lanes.dtype

    def read_block(self, start: Int[jax.Array, ""] | int, size: int) -> Shaped[jax.Array, "B J {size} R"]:
        """Tokens `start` to `start + size`, `[B, J, size, R]`."""
        return jax.lax.dynamic_slice_in_dim(self.on_lanes, start, size, axis=3).swapaxes(2, 3)

    def write_tokens(
        self, new: Shaped[jax.Array, "B J T R"], start: Int[jax.Array, " B"], counts: Int[jax.Array, " B"]
    ) -> "TokensOnLanes":
        """As `state.write_tokens`, of `new` `[B, J, T, R]`."""
        on_lanes = write_tokens(self.on_lanes, new.swapaxes(2, 3), start, counts, token_axis=3)
        return dataclasses.replace(self, on_lanes=on_lanes)


@state
class ExactOnLanes(TokensOnLanes):
    """The same of exact tokens, whose bytes are told apart."""

    on_lanes: jax.Array = leaf("batch", "kv_heads", "head_dim", "tokens", kind="exact")


@state
class EndsOnLanes(TokensOnLanes):
    """The same of exact ends, of which every device of a mesh has all."""

    on_lanes: jax.Array = leaf("batch", "kv_heads", "head_dim", "end_tokens", kind="exact")


@state
class QuantisedOnLanes:
    """8-bit coefficients of tokens with a scale for each component of 128 tokens, the codes transposed.

    Attributes:
        on_lanes: int8 codes `[B, J, R, S]`.
        scales: as in `QuantisedTokens`, `[B, J, tiles, R]`.
    """

    on_lanes: jax.Array = leaf("batch", "kv_heads", "rank", "tokens", kind="coefficients")
    scales: jax.Array = leaf("batch", "kv_heads", "tokens", None, kind="scales")

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array that it stands for."""
        batch, heads, rank, size = self.on_lanes.shape
        return batch, heads, size, rank

    def in_rows(self) -> QuantisedTokens:
        return QuantisedTokens(self.on_lanes.swapaxes(2, 3), self.scales, None, 8, COEFFICIENTS, self.shape[3])

    def read_block(self, start: Int[jax.Array, ""] | int, size: int) -> Float[jax.Array, "B J {size} R"]:
        """Tokens `start` to `start + size`, float32 `[B, J, size, R]`."""
        codes = jax.lax.dynamic_slice_in_dim(self.on_lanes, start, size, axis=3).swapaxes(2, 3)
        tiles = (start + jnp.arange(size)) // COEFFICIENTS.tokens
        return codes.astype(jnp.float32) * widen_scales(jnp.take(self.scales, tiles, axis=2))


@state
class WaterFilledOnLanes:
    """Packed components of several widths, the bytes of a token one below the other.

    Attributes:
        on_lanes: uint8 `[B, J, C', S']`, C bytes as in `WaterFilled` and zeros up to whole registers, S' a multiple of
            `LANES`.
        runs: see `WidthRuns`.
        size: S.
    """

    on_lanes: jax.Array = leaf("batch", "kv_heads", None, "tokens", kind="coefficients")
    runs: WidthRuns = static()
    size: int = static()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array that it stands for."""
        batch, heads, *_ = self.on_lanes.shape
        return batch, heads, self.size, components_of(self.runs)

    def in_rows(self) -> WaterFilled:
        return WaterFilled(self.on_lanes[..., : self.size].swapaxes(2, 3)[..., : bytes_of(self.runs)], self.runs)

    def read_block(self, start: Int[jax.Array, ""] | int, size: int) -> Float[jax.Array, "B J {size} R"]:
        """Tokens `start` to `start + size` in units of their steps, float32 `[B, J, size, R]`."""
        block = jax.lax.dynamic_slice_in_dim(self.on_lanes, start, size, axis=3)
        return dataclasses.replace(self, on_lanes=block, size=size).in_rows().read_block(0, size)

    def write_tokens(
        self, new: Float[jax.Array, "B J T R"], start: Int[jax.Array, " B"], counts: Int[jax.Array, " B"]
    ) -> "WaterFilledOnLanes":
        """As `state.write_tokens`, of `new` `[B, J, T, R]`."""
        fresh = packed_on_lanes(WaterFilled(pack(new, self.runs), self.runs)).on_lanes
        fresh = fresh[..., : new.shape[2]]
        return dataclasses.replace(self, on_lanes=write_tokens(self.on_lanes, fresh, start, counts, token_axis=3))


def packed_on_lanes(stored: WaterFilled) -> WaterFilledOnLanes:
    """Packed tokens transposed, with zeros up to a multiple of `PACKED_ROWS` bytes and of `LANES` tokens."""
    more = -stored.codes.shape[3] % PACKED_ROWS
    codes = jnp.pad(jnp.asarray(stored.codes), ((0, 0), (0, 0), (0, 0), (0, more)))
    return WaterFilledOnLanes(_transposed(codes), stored.runs, codes.shape[2])


def _transposed(rows: jax.Array) -> jax.Array:
    """`[B, J, C, S']` of `[B, J, S, C]`."""
    return jnp.pad(rows.swapaxes(2, 3), ((0, 0), (0, 0), (0, 0), (0, -rows.shape[2] % LANES)))


def tokens_on_lanes(stored: Any) -> Any:
    """Coefficients `[B, J, S, R]` transposed; quantised in tiles of several tokens and several channels, as they are."""
    if isinstance(stored, WaterFilled):
        return packed_on_lanes(stored)
    if not isinstance(stored, QuantisedTokens | PackedTokens):
        return TokensOnLanes(_transposed(stored), stored.shape[2])
    if stored.bits == 8 and stored.tile == COEFFICIENTS:
        return QuantisedOnLanes(stored.codes.swapaxes(2, 3), stored.scales)
    return tiles_on_lanes(stored)


_OF_TOKENS = (("tokens", "rank"), ("tokens", "head_dim"), ("end_tokens", "head_dim"))
_OF_KIND = {"exact": ExactOnLanes}


def lay_out(tree: Any, layout: str, page: int | None = None) -> Any:
    """A tree of states with every array of tokens, exact ones or coefficients, laid out as `layout`.

    Args:
        page: tokens that steps read together; None: they read all. A state whose store is read so says it itself.
    """
    if isinstance(tree, tuple | list):
        return type(tree)(lay_out(x, layout, page) for x in tree)
    if not dataclasses.is_dataclass(tree):
        return tree
    if isinstance(tree, QuantisedTokens | PackedTokens | WaterFilled):
        return tokens_on_lanes(tree) if layout == "lanes" else tree
    if isinstance(tree, QuantisedOnLanes | WaterFilledOnLanes) or in_tiles_on_lanes(tree):
        return tree.in_rows() if layout == "rows" else tree
    changes, page = {}, getattr(tree, "store_page", page)
    for field in dataclasses.fields(tree):
        value, info = getattr(tree, field.name), field.metadata.get("leaf")
        of_tokens = info is not None and info.axes[-2:] in _OF_TOKENS
        if value is None:
            continue
        if isinstance(value, TokensOnLanes | PagesInRows | FlatPages):
            changes[field.name] = value.in_rows() if layout == "rows" else value
        elif of_tokens and layout == "lanes" and not dataclasses.is_dataclass(value) and not isinstance(value, OnHost):
            changes[field.name] = _array_on_lanes(value, info, page)
        else:
            changes[field.name] = lay_out(value, layout, page)
    return dataclasses.replace(tree, **changes)


def _array_on_lanes(stored: jax.Array, info: LeafInfo, page: int | None) -> Any:
    """What stands for an array of tokens on a TPU."""
    at_end = info.axes[-2] == "end_tokens"
    pages = None if page is None or at_end else in_pages(stored, page, info.kind)
    if pages is not None:
        return pages
    kind = EndsOnLanes if at_end else _OF_KIND.get(info.kind, TokensOnLanes)
    return kind(_transposed(stored), stored.shape[2])
