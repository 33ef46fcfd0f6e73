"""The GGUF container: metadata and tensor directory, with every length checked against the file.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import dataclasses
import itertools
import math
import mmap
import struct
from pathlib import Path
from typing import Any

from lowrank_kv_jax.models.stored import PLAIN_TYPES, QUANTISED_TYPES, StoredTensor

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_DEEPEST = 8  # arrays of arrays; files have none, and a stack is finite


@dataclasses.dataclass(frozen=True, eq=False)
class GgufFile:
    """Content of a GGUF file: `metadata` by key, `tensors` by GGUF name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]


def read_gguf(path: Path) -> GgufFile:
    """Read the metadata and the tensor directory of a GGUF file (version 2 or 3, little-endian).

    Raises:
        ValueError: the file is truncated or damaged, or tensors have types that are not read (all listed).
    """
    size = path.stat().st_size
    if size < 24:
        raise ValueError(f"{path}: truncated or not a GGUF file ({size} bytes)")
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(path, data)
        try:
            metadata, directory, data_start = _read_header(cursor)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: corrupt GGUF, text near byte {cursor.at} is not UTF-8") from error
    tensors = _locate(path, directory, data_start)
    end = max((tensor.offset + tensor.nbytes for tensor in tensors.values()), default=data_start)
    if end > size:
        raise ValueError(f"{path}: truncated GGUF, its tensors need {end} bytes and the file has {size}")
    in_order = sorted(tensors, key=lambda name: tensors[name].offset)
    for one, other in itertools.pairwise(in_order):
        if tensors[one].offset + tensors[one].nbytes > tensors[other].offset:
            raise ValueError(f"{path}: corrupt GGUF, the bytes of {one!r:.80} and {other!r:.80} overlap")
    return GgufFile(path, metadata, tensors)


class _Cursor:
    """A position in the bytes of a file that refuses to run past the end."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path, self.data, self.at = path, data, 0

    def need(self, count: int):
        if count > len(self.data) - self.at:
            raise ValueError(
                f"{self.path}: truncated or corrupt GGUF, {count} bytes wanted at byte {self.at} "
                f"of {len(self.data)}"
            )

    def scalars(self, code: str, count: int = 1) -> tuple:
        layout = f"<{count}{code}"
        self.need(count * struct.calcsize(f"<{code}"))
        values = struct.unpack_from(layout, self.data, self.at)
        self.at += struct.calcsize(layout)
        return values

    def integer(self, code: str) -> int:
        return self.scalars(code)[0]

    def string(self) -> str:
        length = self.integer("Q")
        self.need(length)
        self.at += length
        return self.data[self.at - length : self.at].decode("utf-8")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item, count = self.integer("I"), self.integer("Q")
            if item in _SCALARS:
                return list(self.scalars(_SCALARS[item], count))
            if depth == _DEEPEST:
                raise ValueError(f"{self.path}: corrupt GGUF, arrays nested too deeply at byte {self.at}")
            self.need(count)  # an item takes a byte at least: a corrupt count must not loop for ever
            return [self.value(item, depth + 1) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"{self.path}: corrupt GGUF, value type {kind} at byte {self.at}")
        return self.scalars(_SCALARS[kind])[0]


def _read_header(cursor: _Cursor) -> tuple[dict[str, Any], dict[str, tuple], int]:
    if cursor.data[:4] != b"GGUF":
        raise ValueError(f"{cursor.path}: not a GGUF file, it starts with {cursor.data[:4]!r}")
    cursor.at = 4
    version = cursor.integer("I")
    if version not in (2, 3):
        raise ValueError(
            f"{cursor.path}: GGUF version {version} is not read, only 2 and 3 in little-endian order"
        )
    tensor_count, key_count = cursor.scalars("Q", 2)
    metadata = {}
    for _ in range(key_count):
        key = cursor.string()
        if key in metadata:
            raise ValueError(f"{cursor.path}: corrupt GGUF, the key {key!r:.80} stands there twice")
        metadata[key] = cursor.value(cursor.integer("I"))
    directory = {}
    for _ in range(tensor_count):
        name, dims = cursor.string(), cursor.integer("I")
        if name in directory:
            raise ValueError(f"{cursor.path}: corrupt GGUF, the tensor {name!r:.80} stands there twice")
        if not 1 <= dims <= 4:
            raise ValueError(f"{cursor.path}: corrupt GGUF, {name!r:.80} has {dims} dimensions; allowed are 1 to 4")
        directory[name] = (cursor.scalars("Q", dims)[::-1], cursor.integer("I"), cursor.integer("Q"))
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"{cursor.path}: corrupt GGUF, general.alignment is {alignment!r:.80}; it must be a power "
                         "of two")
    for name, (_, _, offset) in directory.items():
        if offset % alignment:
            raise ValueError(f"{cursor.path}: corrupt GGUF, the offset of {name!r:.80} is {offset}; it must be a "
                             f"multiple of {alignment}")
    return metadata, directory, -(-cursor.at // alignment) * alignment


def _locate(path: Path, directory: dict[str, tuple], data_start: int) -> dict[str, StoredTensor]:
    import gguf

    supported = {gguf.GGMLQuantizationType[kind].value: kind for kind in (*PLAIN_TYPES, *QUANTISED_TYPES)}
    names = {kind.value: kind.name for kind in gguf.GGMLQuantizationType}
    refused = {
        name: names.get(kind, kind) for name, (_, kind, _) in directory.items() if kind not in supported
    }
    if refused:
        listed = ", ".join(f"{name} ({kind})" for name, kind in refused.items())
        raise ValueError(
            f"{path}: tensors of unsupported type: {listed}; read are {sorted(supported.values())}"
        )
    tensors = {}
    for name, (shape, kind, offset) in directory.items():
        block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        if not shape or 0 in shape or shape[-1] % block:
            raise ValueError(
                f"{path}: corrupt GGUF, {name} of type {supported[kind]} has shape {shape}, "
                f"rows are multiples of {block}"
            )
        nbytes = math.prod(shape) // block * block_bytes
        tensors[name] = StoredTensor(path, data_start + offset, nbytes, shape, supported[kind])
    return tensors
