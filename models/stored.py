"""Arrays as they lie in a checkpoint file, read a slab of rows at a time.

Files are read, not memory-mapped: mapped pages would count as memory beside the converted weights.
"""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

PLAIN_TYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
PACKED_TYPES = {"U8": np.dtype(np.uint8)}
"""Of codes that are read two tensors at a time; see `mxfp4`."""
QUANTISED_TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")

SLAB_ELEMENTS = 1 << 21  # 8 MiB of float32: what a conversion holds beside source and destination


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Where and how one tensor is stored.

    Attributes:
        path: file that holds it.
        offset: first byte in the file.
        nbytes: bytes in the file.
        shape: as stored; matrices are `[out, in]`.
        kind: element type, a key of `PLAIN_TYPES` or `PACKED_TYPES`, or one of `QUANTISED_TYPES`.
        interleaved_heads: where set, the rows of each of so many heads are stored with the two halves of the
            rotary channels interleaved (llama in GGUF), and reading restores the half-split order.
    """

    path: Path
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    kind: str
    interleaved_heads: int | None = None

    def slabs(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Raw bytes and decoded float values of successive groups of rows, in stored order.

        A vector comes as one slab. Raises ValueError where the file ends early.
        """
        rows = self.shape[0]
        step = rows if len(self.shape) == 1 else max(1, SLAB_ELEMENTS // math.prod(self.shape[1:]))
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            for start in range(0, rows, step):
                count = min(step, rows - start)
                nbytes = self.nbytes // rows * count if step < rows else self.nbytes
                raw = np.fromfile(file, np.uint8, nbytes)
                if raw.size != nbytes:
                    raise ValueError(
                        f"{self.path}: truncated, {nbytes} bytes expected at the end of a tensor"
                    )
                yield raw, _decode(raw, self.kind, (count, *self.shape[1:]))

    def rows(self, first: int, count: int) -> "StoredTensor":
        """Some of its rows, as a tensor of its own; not of one with interleaved heads."""
        row = self.nbytes // self.shape[0]
        return dataclasses.replace(
            self, offset=self.offset + first * row, nbytes=count * row, shape=(count, *self.shape[1:])
        )

    def row_order(self) -> np.ndarray:
        """For each stored row its place among the restored rows, int `[rows]`."""
        order = np.arange(self.shape[0])
        if self.interleaved_heads is None:
            return order
        heads = self.interleaved_heads
        return order.reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)


def _decode(raw: np.ndarray, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    if kind in PLAIN_TYPES or kind in PACKED_TYPES:
        return raw.view((PLAIN_TYPES | PACKED_TYPES)[kind]).reshape(shape)
    import gguf  # only files with quantised tensors pay for this import

    blocks = raw.reshape(*shape[:-1], -1)
    return gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind]).reshape(shape)
