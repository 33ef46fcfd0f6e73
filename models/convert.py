"""From the tensors of a checkpoint to the parameter tree: checked first, then converted one by one."""

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from lowrank_kv_jax.models.config import ModelConfig
from lowrank_kv_jax.models.mxfp4 import Mxfp4Tensor
from lowrank_kv_jax.models.param_info import ParamInfo
from lowrank_kv_jax.models.parameters import Leaf, param_table, stored_arrays
from lowrank_kv_jax.models.stored import StoredTensor


@dataclasses.dataclass(frozen=True, eq=False)
class Checkpoint:
    """What every checkpoint format reduces to.

    Attributes:
        source: file or directory, for messages.
        config: the model that the file describes.
        tensors: name -> stored tensor.
        naming: "hf" or "gguf", the field of `ParamInfo` that holds this format's names.
    """

    source: str
    config: ModelConfig
    tensors: dict[str, StoredTensor | Mxfp4Tensor]
    naming: str

    def stored(self, info: ParamInfo) -> list[StoredTensor | Mxfp4Tensor]:
        """The stored tensors of a parameter: one, its part of one, or those that it stacks."""
        stored = [self.tensors[name] for name in info.names(self.naming)]
        return stored if info.part is None else [tensor.rows(info.part[0], info.stored_shape[0]) for tensor in stored]


def check_tensors(checkpoint: Checkpoint):
    """Raise one ValueError that lists missing, extra and misshapen tensors, the first `LISTED` of each."""
    present, infos = checkpoint.tensors, stored_arrays(checkpoint.config)
    count = sum(info.shape[0] if info.stacked else 1 for info in infos)
    if count > 4 * len(present) + 1000:  # of layers times experts a damaged config may ask for more than can be listed
        raise ValueError(f"{checkpoint.source}: its config asks for {count} tensors, and there are {len(present)}")
    expected = {name: info for info in infos for name in info.names(checkpoint.naming)}
    missing = [f"missing: {name} {info.tensor_shape}" for name, info in expected.items() if name not in present]
    extra = [
        f"extra: {name} {present[name].shape}"
        for name in present
        if name not in expected and not _redundant(name, checkpoint.config)
    ]
    misshapen = [
        f"misshapen: {name} is {present[name].shape}, the config asks for {info.tensor_shape}"
        for name, info in expected.items()
        if name in present and present[name].shape != info.tensor_shape
    ]
    problems = [line for found in (missing, extra, misshapen) for line in _first(found)]
    if problems:
        raise ValueError(f"{checkpoint.source}: tensors do not fit the config\n  " + "\n  ".join(problems))


LISTED = 8
"""Tensors of a kind: a name that all lack, or one shape too many, would be hundreds of lines."""


def _first(lines: list[str]) -> list[str]:
    more = len(lines) - LISTED
    return lines if more <= 1 else [*lines[:LISTED], f"and {more} more {lines[0].partition(':')[0]}"]


def _redundant(name: str, config: ModelConfig) -> bool:
    """Tensors that some checkpoints carry although the config already says what is in them."""
    if name in ("lm_head.weight", "output.weight"):
        return config.tie_embeddings
    if name == "embed_out.weight":
        return config.tie_embeddings and config.family == "gpt_neox"
    return name == "rope_freqs.weight"


def convert(
    checkpoint: Checkpoint, dtype: np.dtype, place: Callable[[np.ndarray, Leaf], jax.Array]
) -> tuple[dict, str]:
    """Read every tensor into its final dtype and place.

    Args:
        checkpoint: a checkpoint that passed `check_tensors`.
        dtype: of the weights.
        place: moves one converted host array to its device or devices.

    Returns:
        The parameter tree, and a SHA-256 of the config and the stored bytes: it does not depend on `dtype`
        or on where the weights are placed.
    """
    leaves, treedef = jax.tree.flatten(param_table(checkpoint.config))
    placed: list[jax.Array | None] = [None] * len(leaves)
    digests = {}
    # the largest first: its host copy then stands beside an empty device, not beside all the other weights
    for i in sorted(range(len(leaves)), key=lambda i: -np.prod(leaves[i].shape)):
        host, found = _converted(checkpoint, leaves[i], dtype)
        digests |= found
        placed[i] = place(host, leaves[i])
        del host
    total = hashlib.sha256(_description(checkpoint.config).encode())
    for name in sorted(digests):
        total.update(name.encode() + digests[name])
    return treedef.unflatten(placed), total.hexdigest()


def _description(config: Any) -> str:
    """`repr` without the fields that came later and stand at their default, so that a model keeps its fingerprint."""
    if not dataclasses.is_dataclass(config):
        return repr(config)
    values = [(field, getattr(config, field.name)) for field in dataclasses.fields(config)]
    told = (f"{field.name}={_description(value)}" for field, value in values
            if not (field.metadata.get("later") and value == field.default))
    return f"{type(config).__qualname__}({', '.join(told)})"


def _converted(checkpoint: Checkpoint, leaf: Leaf, dtype: np.dtype) -> tuple[np.ndarray, dict[str, bytes]]:
    """One parameter in its final shape and dtype, and the digests of what it was made of by their keys."""
    host = np.empty(leaf.shape, dtype)
    views = zip(leaf.pieces, leaf.views(host), strict=True)
    return host, {info.key: _read(checkpoint.stored(info), info, view) for info, view in views}


def _read(tensors: list[StoredTensor | Mxfp4Tensor], info: ParamInfo, host: np.ndarray) -> bytes:
    """Read one array into `host`, of its shape and the final dtype; the digest of its stored bytes."""
    digest = hashlib.sha256()
    columns = ... if info.turn is None else (..., slice(info.turn[0], None, info.turn[1]))
    for tensor, part in zip(tensors, host if info.stacked else [host], strict=True):
        rows = part.T if info.transposed else part  # a view with the axes as stored
        order, start = tensor.row_order(), 0
        for raw, values in tensor.slabs():
            rows[order[start : start + len(values)]] = values[columns]
            start += len(values)
            digest.update(raw.data)
    return digest.digest()
