"""MXFP4 weights of published gpt-oss checkpoints: 32 four-bit floats share a power of two (OCP Microscaling, 2023)."""

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np

from lowrank_kv_jax.models.stored import StoredTensor

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = np.array([*_POSITIVE, *(-x for x in _POSITIVE)], np.float32)
"""Of the 16 codes of e2m1: a sign, two bits of exponent, one of mantissa."""
BIAS = 127
"""Of the exponents that scales are."""
BLOCK_BYTES = 16
SUFFIXES = ("_blocks", "_scales")
"""Of the two tensors of a weight."""


@dataclasses.dataclass(frozen=True)
class Mxfp4Tensor:
    """The matrices `[E, in, out]` of E experts as a checkpoint keeps them; read like a `StoredTensor`.

    Attributes:
        blocks: uint8 `[E, out, in / 32, 16]`, two codes a byte, the lower one first.
        scales: uint8 `[E, out, in / 32]`.
    """

    blocks: StoredTensor
    scales: StoredTensor

    @property
    def shape(self) -> tuple[int, ...]:
        experts, outs, blocks = self.scales.shape
        return experts, 2 * BLOCK_BYTES * blocks, outs

    def slabs(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Raw bytes and float32 values `[1, in, out]` of one expert after the other."""
        for expert in range(self.shape[0]):
            one = self.rows(expert, 1)
            (raw_blocks, blocks), (raw_scales, scales) = next(one.blocks.slabs()), next(one.scales.slabs())
            yield np.concatenate([raw_blocks, raw_scales]), decoded(blocks, scales)

    def rows(self, first: int, count: int) -> "Mxfp4Tensor":
        """Some of its experts, as a tensor of its own."""
        return Mxfp4Tensor(self.blocks.rows(first, count), self.scales.rows(first, count))

    def row_order(self) -> np.ndarray:
        """For each stored expert its place, int `[E]`."""
        return np.arange(self.shape[0])


def decoded(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float32 `[E, in, out]` of uint8 blocks `[E, out, in / 32, 16]` and scales `[E, out, in / 32]`."""
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], 2 * BLOCK_BYTES)
    values = np.ldexp(VALUES[codes], scales[..., None].astype(np.int32) - BIAS)
    return values.reshape(*scales.shape[:2], -1).swapaxes(1, 2)


def joined(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor | Mxfp4Tensor]:
    """Tensors by name, two that belong together under the name of their weight; others as they are."""
    found: dict[str, StoredTensor | Mxfp4Tensor] = dict(tensors)
    for name, blocks in tensors.items():
        weight = name.removesuffix(SUFFIXES[0])
        scales = tensors.get(weight + SUFFIXES[1])
        if weight != name and scales is not None and _fit(blocks, scales):
            del found[name], found[weight + SUFFIXES[1]]
            found[weight] = Mxfp4Tensor(blocks, scales)
    return found


def _fit(blocks: StoredTensor, scales: StoredTensor) -> bool:
    of_bytes = blocks.kind == scales.kind == "U8"
    return of_bytes and len(scales.shape) == 3 and blocks.shape == (*scales.shape, BLOCK_BYTES)
