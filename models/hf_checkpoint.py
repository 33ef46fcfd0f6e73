"""HF model directories: `config.json` and safetensors, in one file or in shards with an index."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from lowrank_kv_jax.models.config import ModelConfig, token_ids
from lowrank_kv_jax.models.convert import Checkpoint
from lowrank_kv_jax.models.stored import PLAIN_TYPES, StoredTensor


def open_hf_directory(directory: Path) -> Checkpoint:
    """The checkpoint in an HF model directory.

    Raises:
        FileNotFoundError: the directory, `config.json`, the weights or one of their shards are not there.
        ValueError: a file is damaged, or holds what the decoder does not implement.
    """
    config = ModelConfig.from_hf(_read_json(directory / "config.json"))
    if (
        directory / "generation_config.json"
    ).is_file():  # its list of end tokens is the one that generation heeds
        generation = _read_json(directory / "generation_config.json")
        if generation.get("eos_token_id") is not None:
            config = dataclasses.replace(config, eos_ids=token_ids(generation["eos_token_id"]))
    tensors = {}
    for path in _weight_files(directory):
        tensors.update(read_safetensors_header(path))
    if config.family == "gpt2":  # with the head of a language model the same names have a prefix
        tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    return Checkpoint(str(directory), config, tensors, naming="hf")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: a JSON object is expected, got a {type(content).__name__}")
    return content


def _weight_files(directory: Path) -> list[Path]:
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if not index.is_file():
        if not single.is_file():
            found = sorted(path.name for path in directory.iterdir())
            raise FileNotFoundError(
                f"{directory}: neither {single.name} nor {index.name} (found: {found}); "
                "weights in other formats than safetensors are not read"
            )
        return [single]
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{index}: has no weight_map")
    shards = sorted(set(weight_map.values()))
    if missing := [name for name in shards if not (directory / name).is_file()]:
        raise FileNotFoundError(f"{directory}: shards named in {index.name} are missing: {missing}")
    return [directory / name for name in shards]


def read_safetensors_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file: 8 bytes of header length, a JSON header, the bytes of the tensors.

    Raises:
        ValueError: the file is shorter than its header says, the header is damaged, or an element type is
            not read.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(
                f"{path}: truncated or not a safetensors file (header of {length} bytes, file of {size})"
            )
        try:
            header = json.loads(file.read(length))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: not a safetensors file, its header is not JSON ({error})") from error
    header.pop("__metadata__", None)
    tensors = {name: _entry(path, 8 + length, name, entry) for name, entry in header.items()}
    end = max((tensor.offset + tensor.nbytes for tensor in tensors.values()), default=0)
    if end > size:
        raise ValueError(f"{path}: truncated, its header asks for {end} bytes and the file has {size}")
    return tensors


def _entry(path: Path, data_start: int, name: str, entry: dict[str, Any]) -> StoredTensor:
    try:
        kind, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: damaged header entry of {name}: {entry!r}") from error
    if kind not in PLAIN_TYPES:
        raise ValueError(f"{path}: {name} has element type {kind!r}; it must be one of {sorted(PLAIN_TYPES)}")
    if end - start != math.prod(shape) * PLAIN_TYPES[kind].itemsize:
        raise ValueError(f"{path}: {name} {shape} of {kind} does not fill its {end - start} bytes")
    return StoredTensor(path, data_start + start, end - start, shape, kind)
