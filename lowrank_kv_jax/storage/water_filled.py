"""Tokens whose components have bits of their own, packed: 8, 4, 2, 1 or none at all.

Components are sorted by variance, so that those of one width stand side by side, in runs. What is stored are numbers in
units of each component's quantiser step: a step is the same for all tokens of a row and belongs to what expands them, so
that no token has a scale or a zero of its own.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Float, Float32, Int, UInt8

from lowrank_kv_jax.storage.state import leaf, state, static, write_tokens
from lowrank_kv_jax.storage.tokens_last import TokensLast

WIDTHS = (8, 4, 2, 1)
"""Bits of a stored component; powers of two, so that none straddles a byte."""

WORD, MANY = 4, 8
"""Bytes. A token of whole words is one that a GPU copies as it lies (`pallas_kernels/gpu_packed.py`); where there are
many, it matters little how a word's last are spent."""

WidthRuns = tuple[tuple[int, int], ...]
"""(bits, components) of each run, widest first; components without bits are not there."""


@state
class WaterFilled:
    """Components in their own bits; stands in the place of an array `[B, J, S, R]` in a segment.

    The uniform mid-rise quantiser: a component in b bits is floor(x), cut to -2^(b-1)..2^(b-1) - 1, and it reads as the
    middle of its step. What was read is stored again without a change.

    Attributes:
        codes: uint8 `[B, J, S, C]`, C = `bytes_of(runs)`. The n components of a run in b bits take m = ceil(n b / 8)
            bytes: component i has the bits from b * (i // m) on of byte i % m, so that a shift yields a stretch of them.
            `TokensLast` on a CPU.
        runs: see `WidthRuns`.
    """

    codes: jax.Array = leaf("batch", "kv_heads", "tokens", "bytes", kind="coefficients")
    runs: WidthRuns = static()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array that it stands for."""
        return (*self.codes.shape[:-1], components_of(self.runs))

    @property
    def widths(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """By leaf, (bits, bytes) of the stretches of a token: what an entropy coder codes apart."""
        return {"codes": tuple((bits, bytes_of(((bits, count),))) for bits, count in self.runs)}

    @property
    def tokens_last(self) -> bool:
        """Whether what `read_parts` gives has the tokens last."""
        return isinstance(self.codes, TokensLast)

    def read_block(self, start: Int[jax.Array, ""] | int, size: int) -> Float32[jax.Array, "B J {size} R"]:
        """Tokens `start` to `start + size` in units of their steps, float32 `[B, J, size, R]`."""
        whole = jnp.concatenate(self.read_parts(start, size), axis=-2 if self.tokens_last else -1)
        return whole.swapaxes(2, 3) if self.tokens_last else whole

    def read_parts(self, start: Int[jax.Array, ""] | int, size: int) -> tuple[Float32[jax.Array, "B J _ _"], ...]:
        """The same as columns that stand side by side, run by run, `[B, J, size, .]`, or `[B, J, ., size]` where the
        tokens are last."""
        if isinstance(self.codes, TokensLast):
            return unpack_runs(self.codes.block(start, size), self.runs, axis=-2)
        return unpack_runs(jax.lax.dynamic_slice_in_dim(self.codes, start, size, axis=2), self.runs)

    def write_block(self, start: Int[jax.Array, ""] | int, new: Float[jax.Array, "B J T R"]) -> "WaterFilled":
        """Tokens `[B, J, T, R]` written from slot `start` on."""
        packed = pack(new, self.runs)
        if isinstance(self.codes, TokensLast):
            return dataclasses.replace(self, codes=self.codes.write_block(start, packed))
        return dataclasses.replace(self, codes=jax.lax.dynamic_update_slice_in_dim(self.codes, packed, start, axis=2))

    def write_tokens(
        self, new: Float[jax.Array, "B J T R"], start: Int[jax.Array, " B"], counts: Int[jax.Array, " B"]
    ) -> "WaterFilled":
        """As `state.write_tokens`, of `new` `[B, J, T, R]`; O(T)."""
        return dataclasses.replace(self, codes=write_tokens(self.codes, pack(new, self.runs), start, counts))

    def filled(self, x: Float[jax.Array, "B J T R"]) -> "WaterFilled":
        """With `x` `[B, J, T, R]` in its first T slots, T <= S; what a CPU held is an array again."""
        packed = pack(x, self.runs)
        whole = packed.shape[2] == self.codes.shape[2]
        return dataclasses.replace(
            self, codes=packed if whole else jnp.asarray(self.codes).at[:, :, : packed.shape[2]].set(packed)
        )


def empty_water_filled(batch: int, heads: int, size: int, runs: WidthRuns) -> WaterFilled:
    """Room for `size` tokens of each head."""
    return WaterFilled(jnp.zeros((batch, heads, size, bytes_of(runs)), jnp.uint8), runs)


def middle_of(bits: int) -> float:
    """By how much codes of so many bits, counted from 0, are above the numbers that they stand for."""
    return 2.0 ** (bits - 1) - 0.5


def components_of(runs: WidthRuns) -> int:
    """R."""
    return sum(count for _, count in runs)


def bytes_of(runs: WidthRuns) -> int:
    """Bytes of a token: each run ends with a byte."""
    return sum(-(-count * bits // 8) for bits, count in runs)


def in_words(runs: WidthRuns, components: int) -> WidthRuns:
    """Runs of whole words, with as many bits more as that takes; of fewer than `MANY` bytes they are left as they are.

    Args:
        components: the most that there are. Those that have no bits get one first, then the last of a width the next one.
    """
    counts = {bits: dict(runs).get(bits, 0) for bits in WIDTHS}
    while (size := bytes_of(tuple(counts.items()))) >= MANY and size % WORD:
        left = components - sum(counts.values())
        narrow = next((bits for bits in (1, 2, 4) if counts[bits]), None)
        if left > 0:
            counts[1] += min(8, left)
        elif narrow is None:
            break
        else:  # as many as one byte more makes twice as wide
            moved = min(8 // narrow, counts[narrow])
            counts[narrow] -= moved
            counts[2 * narrow] += moved
    return tuple((bits, count) for bits, count in counts.items() if count)


def pack(x: Float[jax.Array, "*lead R"], runs: WidthRuns) -> UInt8[jax.Array, "*lead C"]:
    """uint8 `[..., C]` of numbers `[..., R]` in units of their steps."""
    packed, begin = [], 0
    for bits, count in runs:
        part, half = x[..., begin : begin + count].astype(jnp.float32), 2.0 ** (bits - 1)
        codes = (jnp.clip(jnp.floor(part), -half, half - 1) + half).astype(jnp.uint8)
        begin, each = begin + count, 8 // bits
        if each > 1:
            codes = jnp.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, -count % each)])
            planes = codes.reshape(*codes.shape[:-1], each, -1)
            shifts = bits * jnp.arange(each, dtype=jnp.uint8)
            codes = jnp.sum(planes << shifts[:, None], axis=-2, dtype=jnp.uint8)
        packed.append(codes)
    return jnp.concatenate(packed, axis=-1)


def unpack(packed: UInt8[jax.Array, "*lead C"], runs: WidthRuns) -> Float32[jax.Array, "*lead R"]:
    """Numbers float32 `[..., R]` in units of their steps, of what `pack` returned: the middles of those steps."""
    return jnp.concatenate(unpack_runs(packed, runs), axis=-1)


def unpack_runs(
    packed: UInt8[jax.Array, "..."], runs: WidthRuns, axis: int = -1
) -> tuple[Float32[jax.Array, "..."], ...]:
    """The same run by run, float32 `[..., count]` each. Into one array, side by side, XLA on a CPU writes them element
    by element, with a branch for each run.

    Args:
        axis: of the bytes, which becomes that of the components; -1, or -2 where the tokens are last.
    """
    parts, begin = [], 0
    for bits, count in runs:
        size = -(-count * bits // 8)
        codes, middle = jax.lax.slice_in_dim(packed, begin, begin + size, axis=axis), middle_of(bits)
        begin += size
        if bits < 8:
            shifts = jnp.arange(0, 8, bits, dtype=jnp.uint8).reshape(-1, *(1,) * -axis)
            planes = (jnp.expand_dims(codes, axis - 1) >> shifts) & jnp.uint8(2**bits - 1)
            lead = codes.shape[: codes.ndim + axis]
            codes = planes.reshape(*lead, -1, *codes.shape[codes.ndim + axis + 1 :])
            codes = jax.lax.slice_in_dim(codes, 0, count, axis=axis)
        parts.append(codes.astype(jnp.float32) - middle)
    return tuple(parts)
