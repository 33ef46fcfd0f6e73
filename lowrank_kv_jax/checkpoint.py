"""Saving arrays with Orbax beside a JSON description of what they are; written aside, then renamed."""

import json
import shutil
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

METADATA = "lowrank_kv.json"
ARRAYS = "arrays"
FORMAT = 1


def save_arrays(path: str | Path, kind: str, arrays: Mapping[str, jax.Array], metadata: Mapping[str, Any]) -> None:
    """Write named arrays and what describes them to the directory `path`, replacing what an earlier save left there.

    Args:
        kind: what is saved; `load_arrays` refuses to read one kind as another.

    Raises:
        FileExistsError: `path` exists and no save of this library made it.
    """
    import orbax.checkpoint as ocp

    path = Path(path).expanduser().absolute()
    if path.exists() and not (path / METADATA).is_file():
        raise FileExistsError(f"{path} exists and is not a saved {kind}: choose another place")
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(scratch / ARRAYS, dict(arrays))
        versions = {name: version(name) for name in ("jax", "orbax-checkpoint")}
        description = {"format": FORMAT, "kind": kind, "versions": versions, **metadata}
        (scratch / METADATA).write_text(json.dumps(description, indent=1, sort_keys=True))
        replaced = path.with_name(f"{scratch.name}.old")
        if path.exists():  # set aside, not removed: a crash between the two renames loses nothing
            path.rename(replaced)
        scratch.rename(path)
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def load_metadata(path: str | Path, kind: str) -> dict[str, Any]:
    """The description of what was saved.

    Raises:
        FileNotFoundError: nothing was saved there.
        ValueError: it is damaged, of another kind or of an unknown format.
    """
    path = Path(path).expanduser().absolute()
    if not (path / METADATA).is_file():
        raise FileNotFoundError(f"{path}: no saved {kind} here ({METADATA} is missing)")
    try:
        metadata = json.loads((path / METADATA).read_text())
    except ValueError as error:
        raise ValueError(f"{path / METADATA} is damaged: {error}") from error
    if metadata.get("kind") != kind:
        raise ValueError(f"{path} holds {metadata.get('kind')!r}, not {kind!r}")
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{path} has format {metadata.get('format')!r}; this version reads format {FORMAT}")
    return metadata


def load_arrays(path: str | Path, like: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """The arrays, with the dtypes and shardings of `like`.

    Raises:
        ValueError: names, shapes or dtypes differ from what was saved.
    """
    import orbax.checkpoint as ocp

    path = Path(path).expanduser().absolute() / ARRAYS
    with ocp.StandardCheckpointer() as checkpointer:
        saved = checkpointer.metadata(path).item_metadata.tree
        wrong = sorted(set(saved) ^ set(like)) + [
            f"{name}: {tuple(saved[name].shape)} {saved[name].dtype}, expected {like[name].shape} {like[name].dtype}"
            for name in like
            if name in saved and (tuple(saved[name].shape), saved[name].dtype) != (like[name].shape, like[name].dtype)
        ]
        if wrong:
            raise ValueError(f"{path.parent}: what was saved does not fit: {'; '.join(map(str, wrong))}")
        return checkpointer.restore(path, dict(like))
