"""What the kernels share: queries by kv head, visible slots as ranges, and the merge of splits."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lowrank_kv_jax.attention.partial import AttnPartial
from lowrank_kv_jax.pallas_kernels.dispatch import Unsupported
from lowrank_kv_jax.storage.eight_bits import EightBits
from lowrank_kv_jax.storage.pages_in_rows import ChosenPages
from lowrank_kv_jax.storage.scaled_tokens import ScaledTokens
from lowrank_kv_jax.storage.water_filled import WaterFilled, WidthRuns

EMPTY = -1e30  # the log-sum-exp of a part without tokens inside of kernels, where -inf would make NaNs
LOG2_E = 1.4426950408889634  # kernels exponentiate in base 2, as the hardware does
TILE_OF_SCALES = 128  # tokens that share the scale of a component in 8-bit storage
MANY_COLUMNS = 512  # beside more, a piece of 32 columns spills registers: 2 KiB at rank 608 on sm_90, of 64 nothing
WIDEST_HEAD = 256  # channels of exact tokens in 8 bits that are widened in registers; others by XLA
MAX_ROWS = 64  # query rows of a kv head; longer blocks of queries are matrix products that XLA does as well


class Packed(NamedTuple):
    """Queries that one pass over the tokens serves.

    Attributes:
        q: `[B, H, M, D]`, M = T * N / H query rows of each of H heads.
        begin, end: int32 `[B, T]`, the slots that a query sees: begin <= slot < end.
        span: int32 `[B, 2]`, lowest begin and highest end of a batch row; (0, 0) where nothing is seen.
        parts: of the tokens, each of which is a row of a launch.
    """

    q: jax.Array
    begin: jax.Array
    end: jax.Array
    span: jax.Array
    parts: int = 1

    @property
    def rows(self) -> int:
        """Of a launch."""
        return len(self.q) * self.parts


def pack(q: jax.Array, heads: int, begin: jax.Array, end: jax.Array) -> Packed:
    """`Packed` from queries `[B, T, N, D]` and slot ranges `[B, T]`.

    Raises:
        Unsupported: more query rows than `MAX_ROWS`.
    """
    batch, queries, q_heads, _ = q.shape
    per_head = q_heads // heads
    rows = queries * per_head
    if rows > MAX_ROWS:
        raise Unsupported(f"more than {MAX_ROWS} query rows (queries x query heads) a kv head")
    packed = q.reshape(batch, queries, heads, per_head, -1).swapaxes(1, 2).reshape(batch, heads, rows, -1)
    sees = end > begin
    low = jnp.min(jnp.where(sees, begin, jnp.iinfo(jnp.int32).max), axis=1)
    high = jnp.max(jnp.where(sees, end, 0), axis=1)
    span = jnp.where(high[:, None] > 0, jnp.stack([low, high], axis=1), 0)
    return Packed(packed, begin, end, span)


def ranges_of_rows(packed: Packed) -> tuple[jax.Array, jax.Array]:
    """begin and end int32 `[B, M]` of query rows."""
    each = packed.q.shape[2] // packed.begin.shape[1]
    begin, end = (jnp.repeat(x, each, axis=1) for x in (packed.begin, packed.end))
    return begin, end


def by_program(x: jax.Array, heads: int) -> jax.Array:
    """`[B, H, n, M, ..]` of `[B, n, T, N, ..]`, query rows as `pack` orders them."""
    batch, stretches, queries, _, width = x.shape
    x = jnp.moveaxis(x.reshape(batch, stretches, queries, heads, -1, width), 3, 1)
    return x.reshape(batch, heads, stretches, -1, width)


def by_query(part: AttnPartial, queries: int) -> AttnPartial:
    """Partial `[B, T, N, ...]` of one `[B, H, M, ...]`."""

    def heads_last(x):
        batch, heads, rows, *rest = x.shape
        x = x.reshape(batch, heads, queries, rows // queries, *rest).swapaxes(1, 2)
        return x.reshape(batch, queries, heads * rows // queries, *rest)

    return AttnPartial(*map(heads_last, part))


def unpack(part: AttnPartial, queries: int) -> AttnPartial:
    """The same of one whose lse is `EMPTY` where nothing was seen, -inf then."""
    return by_query(AttnPartial(part.out, _or_none(part.lse)), queries)


def _or_none(lse: jax.Array) -> jax.Array:
    return jnp.where(lse <= EMPTY / 2, -jnp.inf, lse)


def visible_range(tokens: Any, q_positions: jax.Array, causal: bool, window: int | None):
    """Slots `begin <= slot < end`, int32 `[B, T]` each, that queries at `q_positions` `[B, T]` see.

    Raises:
        Unsupported: the positions do not rise with the slots, so that what is seen is no range.
    """
    begin = jnp.zeros_like(q_positions)
    end = jnp.broadcast_to(tokens.lengths[:, None], q_positions.shape)
    if causal or window is not None:
        through = getattr(tokens.positions, "slots_through", None)
        if through is None:
            raise Unsupported(f"causal or windowed attention over {type(tokens.positions).__name__} positions, "
                              "which need not rise from slot to slot")
        if causal:
            end = jnp.minimum(end, through(q_positions))
        if window is not None:
            begin = through(q_positions - window)
    elif getattr(tokens.positions, "owner", None) is not None:
        raise Unsupported("tokens of all heads packed in one buffer")
    return begin, end


def merge_splits(out: jax.Array, lse: jax.Array) -> AttnPartial:
    """Merge partials of the splits of the tokens, out `[B, H, splits, M, D]`, lse `[B, H, M, splits]`.

    An empty one is (0, `empty_of(splits)`), where all are, (0, -inf). Both results are a softmax of lse and a sum, each
    of which XLA makes one program of on a GPU; the barrier keeps it from sharing the softmax, which would make many.
    """
    if lse.shape[3] == 1:
        return AttnPartial(out[:, :, 0], lse[..., 0])
    weight = jax.nn.softmax(lse, axis=3)
    out = jnp.sum(weight.swapaxes(2, 3)[..., None] * out, axis=2)
    share = jax.nn.softmax(jax.lax.optimization_barrier(lse), axis=3)
    # lse - log(share) is that of all splits, whichever the split
    return AttnPartial(out, _or_none(jnp.sum(share * (lse - jnp.log(jnp.where(share > 0, share, 1))), axis=3)))


def empty_of(splits: int) -> float:
    """The lse of a split without tokens: one that is alone is not merged, and says it as partials do."""
    return EMPTY if splits > 1 else -math.inf


def columns(width: int, most: int = 128) -> tuple[tuple[int, int], ...]:
    """(start, size) of power-of-two pieces that cover `width`: 96 is 64 + 32, 256 twice 128, and 38 twice 32.

    A last piece that reaches beyond the width is read and written under a mask.
    """
    least = 64 if width > MANY_COLUMNS else 32
    pieces, start = [], 0
    while start < width:
        left = width - start
        size = max(least, min(most, 1 << left.bit_length() - 1))
        pieces.append((start, size))
        start += size
    return tuple(pieces)


def power_of_two(n: int, least: int) -> int:
    """The smallest power of two of at least `n` and `least`."""
    return max(least, 1 << (n - 1).bit_length())


class Stored(NamedTuple):
    """Tokens as arrays that a kernel reads.

    Attributes:
        codes: `[B, J, S, R]`; packed ones uint8 `[B, J, S, C]`.
        scales: of 8-bit ones `[B, J, tiles, R]`.
        runs: widths of packed ones.
        norms: of directions `[B, J, S, L]`, what each token of layer `layer` is multiplied by.
        chosen: of tokens in pages int32 `[B, U, C]`, which of these are read, one behind the other; U a multiple of J.
        page: tokens of each.
    """

    codes: jax.Array
    scales: jax.Array | None
    runs: WidthRuns | None = None
    norms: jax.Array | None = None
    layer: int = 0
    chosen: jax.Array | None = None
    page: int = 1

    @property
    def heads(self) -> int:
        """J, or U."""
        return (self.codes if self.chosen is None else self.chosen).shape[1]

    @property
    def slots(self) -> int:
        """Of a head, of chosen pages alone where some are."""
        return self.codes.shape[2] if self.chosen is None else self.chosen.shape[2] * self.page


def in_tiles(tokens: Any) -> bool:
    """Whether tokens are codes with scales other than those that `stored_arrays` knows."""
    if isinstance(tokens, EightBits):
        return tokens.shape[-1] <= WIDEST_HEAD
    return hasattr(tokens, "tile") and not _plain_scales(tokens)


def _plain_scales(tokens: Any) -> bool:
    """8 bits, a scale for each component of `TILE_OF_SCALES` tokens, and tiles that begin with the buffer."""
    tile = getattr(tokens, "tile", None)
    whole = (getattr(tile, "tokens", None), getattr(tile, "channels", None)) == (TILE_OF_SCALES, 1)
    return whole and tokens.bits == 8 and tokens.lows is None


def stored_arrays(tokens: Any, magnitudes: bool = False, pages: bool = False) -> Stored:
    """The arrays behind a segment's keys or values.

    Args:
        magnitudes: whether the kernel reads directions with a magnitude for each token.
        pages: whether it reads chosen ones where they lie.

    Raises:
        Unsupported: a storage that is neither a plain array, nor packed components of several widths, nor such ones,
            nor symmetric 8-bit codes with a scale for each component of every `TILE_OF_SCALES` tokens.
    """
    if pages and isinstance(tokens, ChosenPages):
        return Stored(tokens.rows, None, chosen=tokens.chosen, page=tokens.page)
    tokens = tokens.widened() if hasattr(tokens, "widened") else tokens  # held as bits on a CPU
    if isinstance(tokens, jax.Array):
        return Stored(tokens, None)
    if isinstance(tokens, WaterFilled):
        return Stored(jnp.asarray(tokens.codes), None, tokens.runs)
    if magnitudes and isinstance(tokens, ScaledTokens) and tokens.rotary is None:
        return Stored(tokens.direction, None, None, tokens.norm, tokens.index)
    if not _plain_scales(tokens):
        raise Unsupported(f"tokens stored as {type(tokens).__name__}, other than in 8 bits with a scale for each "
                          f"component of {TILE_OF_SCALES} tokens")
    scales = tokens.scales  # kept as the bits of bfloat16 numbers
    return Stored(tokens.codes, jax.lax.bitcast_convert_type(scales, jnp.bfloat16))
