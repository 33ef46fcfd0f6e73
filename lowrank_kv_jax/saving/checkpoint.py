"""Saving arrays with Orbax beside a JSON description of what they are.

A save is a directory with a description and, in a folder of a new random name, the arrays. Saving again writes other
arrays beside the old ones and then replaces the description in one step: a process that is killed leaves the old save or
the new one, and folders that no description names, which the next save deletes.
"""

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.checks.json_objects import check_fields, parse_json, read_json_object
from lowrank_kv_jax.checks.shown import short
from lowrank_kv_jax.files import behind_links, lock, naming, write_text

METADATA = "lowrank_kv.json"
FORMAT = 3
FLOATS = ("float16", "bfloat16", "float32", "float64")
"""Dtypes of the floating arrays that are saved."""

_ONE_AT_A_TIME = threading.Lock()
"""What saves: Orbax' saves of several threads take each other's unfinished folders for their own, whatever the place."""
_UNREADABLE = "[" if os.sep == "\\" else "[\\"
"""Characters of a path that Orbax, which looks for what it wrote by a pattern, would not find again."""

_FIELDS = {"format": int, "kind": str, "arrays": str, "files": dict, "sha256": str}
_ARRAYS = re.compile(r"arrays-[0-9a-f]{16}")
_OURS = re.compile(_ARRAYS.pattern + r"(\..*)?|" + re.escape(f".{METADATA}.") + r"[0-9a-f]{16}\.writing")
"""Names inside a save beside its description: arrays, those that Orbax had not finished, an unfinished description."""


def save_arrays(
    path: str | Path, kind: str, arrays: Mapping[str, jax.Array | np.ndarray], metadata: Mapping[str, Any],
    block: int | None = None,
) -> None:
    """Write named arrays and what describes them to the directory `path`, replacing an earlier save of the same kind.

    Args:
        path: a link is followed, what it leads to is written.
        kind: what is saved; `load_metadata` refuses to read one kind as another.
        block: bytes that are coded on their own, at most; by default an array at once.

    Raises:
        FileExistsError, ValueError: `path` holds something else, or cannot be read again (see `check_replaceable`).
        OSError: it cannot be written; what was saved there before is as it was.
    """
    import orbax.checkpoint as ocp

    path = behind_links(path)
    check_replaceable(path, kind)
    new = not path.exists()
    with naming(path):
        path.mkdir(parents=True, exist_ok=True)
    with _alone(path):
        name = f"arrays-{secrets.token_hex(8)}"
        try:
            _delete_unnamed(path)
            with _ONE_AT_A_TIME, _failing_by_name(path), ocp.StandardCheckpointer() as checkpointer:
                coding = ocp.SaveArgs(chunk_byte_size=block)
                checkpointer.save(path / name, dict(arrays), save_args=dict.fromkeys(arrays, coding))
                checkpointer.wait_until_finished()
                if checkpointer.metadata(path / name).item_metadata is None:  # it may leave a part and say nothing
                    raise OSError("what Orbax wrote cannot be read")
            versions = {package: version(package) for package in ("jax", "orbax-checkpoint")}
            files = {file: _digest(path / name / file, sync=True) for file in _files(path / name)}
            description = {"format": FORMAT, "kind": kind, "versions": versions, "arrays": name, "files": files}
            description |= metadata
            description["sha256"] = _seal(description)
            write_text(path / METADATA, json.dumps(description, indent=1, sort_keys=True))
        finally:
            _delete_unnamed(path)
            if new:
                with contextlib.suppress(OSError):  # not empty: it was saved
                    path.rmdir()


def check_replaceable(path: str | Path, kind: str) -> None:
    """Raise FileExistsError where `path` holds anything but a save of this kind, or what a killed one left.

    A save of another kind, files that no save of this library made, links and damage are never deleted.

    Raises:
        ValueError: the path has a character with which Orbax reads nothing that it wrote.
    """
    path = behind_links(path)
    if wrong := [letter for letter in _UNREADABLE if letter in str(path)]:
        raise ValueError(f"{path}: has {wrong[0]!r}, with which Orbax cannot read what it wrote; choose another place")
    if not path.exists():
        return
    if not path.is_dir():
        raise FileExistsError(f"{path} is not a directory: choose another place")
    named = None
    if METADATA in os.listdir(path):
        try:
            held = load_metadata(path, kind)
        except (ValueError, OSError) as error:
            raise FileExistsError(f"{path} is not a saved {kind} that could be replaced ({error}): "
                                  "delete it or choose another place") from error
        named = held["arrays"]
        foreign = sorted(set(_files(path / named)) - set(held["files"]))
        if foreign:
            raise _foreign(path, kind, f"{named}/{foreign[0]}")
    for entry in sorted(path.iterdir()):
        own = entry.name in (METADATA, named) or _OURS.fullmatch(entry.name)
        if not own or entry.is_symlink() or entry.is_dir() != entry.name.startswith("arrays"):
            raise _foreign(path, kind, entry.name)


def _foreign(path: Path, kind: str, name: str) -> FileExistsError:
    return FileExistsError(f"{path} holds {name!r}, which is no part of saved {kind}: choose another place")


def discard(path: str | Path) -> None:
    """Delete a save with all that lies in it, as far as that is possible; one that is being written stays."""
    path = behind_links(path)
    with contextlib.suppress(OSError), _alone(path):
        shutil.rmtree(path, ignore_errors=True)


def load_metadata(path: str | Path, kind: str) -> dict[str, Any]:
    """The description of what was saved.

    Raises:
        FileNotFoundError: nothing was saved there.
        ValueError: it is damaged, of another kind or of an unknown format.
    """
    file = behind_links(path) / METADATA
    if not file.is_file():
        raise FileNotFoundError(f"{path}: no saved {kind} here ({METADATA} is missing)")
    try:
        metadata = read_json_object(file)
    except ValueError as error:
        raise ValueError(f"{error}: this save is damaged") from error
    if metadata.get("kind") != kind:
        raise ValueError(f"{file}: kind={short(metadata.get('kind'))}: must be {kind!r}")
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{file}: format={short(metadata.get('format'))}: this version reads format {FORMAT}")
    check_fields(file, metadata, _FIELDS)
    if not _ARRAYS.fullmatch(metadata["arrays"]):
        raise ValueError(f"{file}: arrays={short(metadata['arrays'])}: must be arrays-, then 16 hexadecimal digits")
    return metadata


def load_arrays(
    path: str | Path, metadata: Mapping[str, Any], like: Mapping[str, jax.ShapeDtypeStruct | np.ndarray]
) -> dict[str, Any]:
    """The arrays, with the dtypes and shardings of `like`; NumPy's where these are.

    Those without a sharding are where JAX puts arrays by default, committed to no device, as those that were computed:
    a jitted loop, whose results would be committed as well, would be compiled once more for its second turn.

    Args:
        metadata: of `load_metadata`.

    Raises:
        ValueError: names, shapes or dtypes differ from what was saved, or a file is not as it was saved.
    """
    import orbax.checkpoint as ocp

    path = behind_links(path)
    _check_files(path, metadata)
    folder = path / metadata["arrays"]
    with ocp.StandardCheckpointer() as checkpointer:
        try:
            saved = checkpointer.metadata(folder).item_metadata.tree
            wrong = sorted(set(saved) ^ set(like)) + [
                f"{name}: {tuple(saved[name].shape)} {saved[name].dtype}, expected {like[name].shape} {like[name].dtype}"
                for name in like
                if name in saved and (tuple(saved[name].shape), saved[name].dtype) != (like[name].shape, like[name].dtype)
            ]
        except Exception as error:  # Orbax has no error of its own for files that it did not write
            raise ValueError(f"{folder}: its description of arrays cannot be read ({_first_line(error)})") from error
        if wrong:
            raise ValueError(f"{path}: what was saved does not fit: {'; '.join(map(str, wrong))}")
        if metadata["sha256"] != _seal({field: value for field, value in metadata.items() if field != "sha256"}):
            raise ValueError(f"{path / METADATA}: is damaged (its sha256 is not that of its fields)")
        try:
            found = checkpointer.restore(folder, {name: _restorable(array) for name, array in like.items()})
        except Exception as error:
            raise ValueError(f"{folder}: its arrays cannot be read ({_first_line(error)})") from error
    return {name: x if isinstance(like[name], np.ndarray) else jnp.asarray(x) for name, x in found.items()}


def _restorable(like: jax.ShapeDtypeStruct | np.ndarray) -> jax.ShapeDtypeStruct | np.ndarray:
    """What Orbax is shown: NumPy's array where there is no sharding, since it would look for the device of the save."""
    if isinstance(like, np.ndarray) or like.sharding is not None:
        return like
    return np.broadcast_to(np.zeros((), like.dtype), like.shape)


def _check_files(path: Path, metadata: Mapping[str, Any]) -> None:
    """Raise ValueError unless every file is the one that was saved."""
    folder = path / metadata["arrays"]
    if folder.is_symlink() or not folder.is_dir():
        raise ValueError(f"{folder}: the directory with the arrays is missing")
    held = set(_files(folder))
    for name, digest in metadata["files"].items():
        file = folder / name
        if name not in held or file.is_symlink() or not file.is_file():
            raise ValueError(f"{folder}/{name:.200}: is missing")
        if (found := _digest(file)) != digest:
            raise ValueError(f"{file}: is damaged (sha256 {found[:12]}, saved as {str(digest)[:12]})")


def _seal(description: Mapping[str, Any]) -> str:
    """SHA-256 of a description as it is read again."""
    return hashlib.sha256(json.dumps(parse_json(json.dumps(description)), sort_keys=True).encode()).hexdigest()


def _files(folder: Path) -> list[str]:
    """Names of everything but directories under a folder, links not followed, sorted."""
    return sorted(
        Path(base, name).relative_to(folder).as_posix()
        for base, directories, names in os.walk(folder)
        for name in [*names, *(d for d in directories if Path(base, d).is_symlink())]
    )


def _digest(path: Path, sync: bool = False) -> str:
    """SHA-256 of a file; with `sync` it is on the disk then."""
    with naming(path), open(path, "rb+" if sync else "rb") as file:
        if sync:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold the directory for one save, or to delete it.

    Raises:
        OSError: another process is saving there.
    """
    if os.name == "nt":  # directories are not opened there
        yield
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if not lock(descriptor):
            raise BlockingIOError(f"{path}: another process is saving there")
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _failing_by_name(path: Path) -> Iterator[None]:
    """Whatever Orbax fails with names the directory; it reports a full disk as one of several kinds of errors.

    The first of its threads that fails is raised while others still write: they are waited for, so that what they
    leave can be deleted.
    """
    before = set(threading.enumerate())
    try:
        yield
    except Exception as error:
        deadline = time.monotonic() + PATIENCE
        for thread in set(threading.enumerate()) - before:
            with contextlib.suppress(Exception):  # `join` of Orbax's own raises what the thread failed with
                thread.join(max(0, deadline - time.monotonic()))
        raise OSError(f"{path}: cannot be saved ({_first_line(error)})") from error


PATIENCE = 1.0
"""Seconds that threads of a save that failed are waited for, all together: some may be another's and not end."""


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _delete_unnamed(path: Path) -> None:
    """Delete arrays and descriptions that the description of a save does not name."""
    try:
        named = read_json_object(path / METADATA).get("arrays")
    except (FileNotFoundError, NotADirectoryError):
        named = None
    for entry in path.iterdir():
        if entry.name == named or not _OURS.fullmatch(entry.name):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
