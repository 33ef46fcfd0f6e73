"""Arrays as a few streams of bytes that are alike: what zstd finds little in as they lie, it codes well in these.

An array of 16 bits is a stream of high bytes (sign and exponent, of which few occur) and one of low bytes; packed
components are a stream for each width, whose bytes all have one distribution. A stream runs through all layers, so that
a save holds tens of arrays in the place of hundreds. Zstd's Huffman codes then come within 2% of the entropy of each
component by itself; a static histogram for each costs more than it wins (docs/long-contexts.md).
"""

import collections
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from lowrank_kv_jax.method.accounting import nbytes

BLOCK = 1 << 20
"""Bytes that are coded on their own, and checked and decoded beside others."""

Widths = Mapping[str, tuple[tuple[int, int], ...]]
"""Of packed arrays, by name: (bits, bytes) of the stretches of a token; see `WaterFilled.widths`."""


class _Cut(NamedTuple):
    """Bytes `begin` to `end` of each row of an array."""

    stream: str
    begin: int
    end: int


def to_streams(arrays: Mapping[str, np.ndarray], widths: Widths) -> dict[str, np.ndarray]:
    """Streams by name, uint8 `[n]`, of arrays of any shape and of whole bytes; empty ones are left out."""
    parts: dict[str, list[np.ndarray]] = collections.defaultdict(list)
    for name, x in arrays.items():
        rows = np.ascontiguousarray(x).reshape(-1).view(np.uint8).reshape(-1, _row_bytes(name, x, widths))
        for cut in _cuts(name, x, widths):
            parts[cut.stream].append(rows[:, cut.begin : cut.end].reshape(-1))
    streams = {stream: np.zeros(size, np.uint8) for stream, size in stream_sizes(arrays, widths).items()}
    for stream, whole in streams.items():
        np.concatenate(parts[stream], out=whole[: sum(map(len, parts[stream]))])
    return streams


def from_streams(streams: Mapping[str, np.ndarray], like: Mapping[str, Any], widths: Widths) -> dict[str, np.ndarray]:
    """The arrays that `to_streams` was given, of the shapes and dtypes of `like`."""
    at: collections.Counter[str] = collections.Counter()
    arrays = {}
    for name, x in like.items():
        rows = np.empty((nbytes(x) // _row_bytes(name, x, widths), _row_bytes(name, x, widths)), np.uint8)
        for cut in _cuts(name, x, widths):
            size = len(rows) * (cut.end - cut.begin)
            if size:
                part = streams[cut.stream][at[cut.stream] : at[cut.stream] + size]
                rows[:, cut.begin : cut.end] = part.reshape(len(rows), -1)
                at[cut.stream] += size
        arrays[name] = rows.reshape(-1).view(x.dtype).reshape(x.shape)
    return arrays


def stream_sizes(like: Mapping[str, Any], widths: Widths) -> dict[str, int]:
    """Bytes of each stream, of arrays or what describes them; those of several blocks are filled up with zeros.

    Whole blocks, because Orbax cuts an array into equal ones.
    """
    sizes: collections.Counter[str] = collections.Counter()
    for name, x in like.items():
        for cut in _cuts(name, x, widths):
            sizes[cut.stream] += nbytes(x) // _row_bytes(name, x, widths) * (cut.end - cut.begin)
    return {stream: size if size <= BLOCK else -(-size // BLOCK) * BLOCK for stream, size in sizes.items() if size}


def _row_bytes(name: str, x: Any, widths: Widths) -> int:
    """Of a token whose components are packed, of a number elsewhere."""
    return sum(size for _, size in widths[name]) or 1 if name in widths else x.dtype.itemsize


def _cuts(name: str, x: Any, widths: Widths) -> Iterator[_Cut]:
    """Where the bytes of a row go. A name without its numbers says the same of all layers."""
    field = ".".join(part for part in name.split(".") if not part.isdigit())
    begin = 0
    if name not in widths:
        for byte in range(x.dtype.itemsize):
            yield _Cut(f"{field}.{x.dtype.name}.byte{byte}", byte, byte + 1)
        return
    for bits, size in widths[name]:
        yield _Cut(f"{field}.{bits}bit", begin, begin + size)
        begin += size
