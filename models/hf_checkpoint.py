"""HF model directories: `config.json` and safetensors, in one file or in shards with an index."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lowrank_kv_jax.checks.json_objects import read_json_object
from lowrank_kv_jax.checks.shown import short
from lowrank_kv_jax.models import mxfp4
from lowrank_kv_jax.models.config_attributes import token_ids
from lowrank_kv_jax.models.config_ranges import out_of_range
from lowrank_kv_jax.models.convert import Checkpoint
from lowrank_kv_jax.models.hf_config import read_config
from lowrank_kv_jax.models.stored import PACKED_TYPES, PLAIN_TYPES, StoredTensor

REDUNDANT = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")
"""Ends of the names of tensors that hold what the config says already: frequencies, and causal masks of old GPTs. They
are of any type, and are not read."""


def open_hf_directory(directory: Path) -> Checkpoint:
    """The checkpoint in an HF model directory.

    Raises:
        FileNotFoundError: the directory, `config.json`, the weights or one of their shards are not there.
        ValueError: a file is damaged, or holds what the decoder does not implement.
    """
    with _naming(directory / "config.json") as file:
        config = read_config(read_json_object(file))
    if (directory / "generation_config.json").is_file():  # its list of end tokens is the one that generation heeds
        with _naming(directory / "generation_config.json") as file:
            generation = read_json_object(file)
            if problems := out_of_range({"eos_token_id": generation.get("eos_token_id")}):
                raise ValueError(problems[0])
        if generation.get("eos_token_id") is not None:
            config = dataclasses.replace(config, eos_ids=token_ids(generation["eos_token_id"]))
    tensors = {}
    for path in _weight_files(directory):
        tensors.update(read_safetensors_header(path))
    if config.family == "gpt2":  # with the head of a language model the same names have a prefix
        tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    return Checkpoint(str(directory), config, mxfp4.joined(tensors), naming="hf")


@contextlib.contextmanager
def _naming(file: Path) -> Iterator[Path]:
    """Mistakes name the file; a value that no check foresaw is damage, not a bug."""
    try:
        yield file
    except ValueError as error:
        raise ValueError(str(error) if str(file) in str(error) else f"{file}: {error}") from error
    except (LookupError, TypeError, ArithmeticError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file}: holds what cannot be used ({error!r})") from error


def _weight_files(directory: Path) -> list[Path]:
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if single.is_file():  # also beside an index, which is then of an earlier save
        return [single]
    if not index.is_file():
        found = sorted(path.name for path in directory.iterdir())
        raise FileNotFoundError(f"{directory}: neither {single.name} nor {index.name} (found: {found}); "
                                "weights in other formats than safetensors are not read")
    weight_map = read_json_object(index).get("weight_map")
    names = weight_map.values() if isinstance(weight_map, dict) else [None]
    if not all(isinstance(name, str) and _names_a_file(name) for name in names):
        raise ValueError(f"{index}: weight_map={short(weight_map)}: must be an object that names files of {directory}")
    shards = sorted(set(weight_map.values()))
    if missing := [name for name in shards if not (directory / name).is_file()]:
        raise FileNotFoundError(f"{directory}: shards named in {index.name} are missing: {missing}")
    return [directory / name for name in shards]


def _names_a_file(name: str) -> bool:
    """Whether a name is one of a file beside the one that holds it, and short enough for a file system."""
    return name not in ("", ".", "..") and not {"/", "\0"} & set(name) and len(name.encode("utf-8", "replace")) <= 255


def read_safetensors_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file: 8 bytes of header length, a JSON header, the bytes of the tensors.

    The format's own parser checks the file, that its tensors neither overlap nor leave gaps included; it does not tell
    where they lie, which is read here again.

    Raises:
        ValueError: the file is damaged or truncated, or an element type is not read.
    """
    import safetensors

    try:
        with safetensors.safe_open(path, framework="numpy"):
            pass
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path}: truncated, damaged or not a safetensors file ({error})") from error
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    read = {name: entry for name, entry in header.items() if not name.endswith(REDUNDANT)}  # of whatever type
    return {name: _entry(path, 8 + length, name, entry) for name, entry in read.items()}


def _entry(path: Path, data_start: int, name: str, entry: dict[str, Any]) -> StoredTensor:
    kind, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    packed = kind in PACKED_TYPES and name.endswith(mxfp4.SUFFIXES)
    if kind not in PLAIN_TYPES and not packed:
        raise ValueError(f"{path}: {name} has element type {kind!r}; it must be one of {sorted(PLAIN_TYPES)}")
    return StoredTensor(path, data_start + start, end - start, shape, kind)
