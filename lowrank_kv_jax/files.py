"""Files that are written whole or not at all, and what is refused as a file."""

import contextlib
import os
import re
import secrets
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_KINDS = {
    stat.S_IFDIR: "directory", stat.S_IFCHR: "character device", stat.S_IFBLK: "block device", stat.S_IFIFO: "pipe",
    stat.S_IFSOCK: "socket",
}
_DEVICES = (stat.S_IFCHR, stat.S_IFBLK)


def expanded(path: str | os.PathLike) -> Path:
    """The path with its `~`; that of a user who is not there stays a name like any other.

    Raises:
        ValueError: it is empty, or holds a NUL, which no file can have in its name.
    """
    text = os.path.expanduser(os.fspath(path))
    if not text:
        raise ValueError("path='': must not be empty")
    if "\0" in text:
        raise ValueError(f"{text!r}: holds a NUL, which no path can")
    return Path(text)


def behind_links(path: str | os.PathLike) -> Path:
    """The absolute path that `path` leads to: what is saved onto a link is written behind it."""
    return Path(os.path.realpath(expanded(path)))


def check_regular(path: str | os.PathLike) -> None:
    """Raise ValueError where something other than a regular file has this name; nothing there is as good."""
    kind = _kind(path)
    if kind not in (None, stat.S_IFREG):
        raise ValueError(f"{os.fspath(path)}: is a {_KINDS.get(kind, 'special file')}; give a regular file or a new name")


def refuse_device(path: str | os.PathLike) -> None:
    """Raise ValueError for a device, which may be read for ever."""
    kind = _kind(path)
    if kind in _DEVICES:
        raise ValueError(f"{os.fspath(path)}: is a {_KINDS[kind]}; give a regular file")


def _kind(path: str | os.PathLike) -> int | None:
    try:
        return stat.S_IFMT(os.stat(expanded(path)).st_mode)
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def naming(path: str | os.PathLike) -> Iterator[None]:
    """An error of the system (a full disk, say) names `path`, whatever file or descriptor it met."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[IO[bytes]]:
    """A file to write that takes the place of `path` once all of it is on the disk.

    A process that is killed leaves the old file or the new one, and beside it at most an unfinished one, which the next
    writer deletes. The unfinished name cannot be foreseen, and what is planted there is not followed.

    Raises:
        ValueError: `path` is no regular file; OSError, naming `path`: it cannot be written, and is as it was.
    """
    target = behind_links(path)
    check_regular(target)
    prefix = f".{target.name[:48]}."
    with naming(path):
        _delete_unfinished(target.parent, prefix)
        scratch = target.with_name(f"{prefix}{secrets.token_hex(8)}.writing")
        with open(scratch, "xb") as file:
            try:
                lock(file.fileno())
                yield file
                file.flush()
                os.fsync(file.fileno())
                os.replace(scratch, target)
            except BaseException:
                with contextlib.suppress(OSError):  # the close that follows has nothing left to say
                    scratch.unlink()
                raise


def write_text(path: str | os.PathLike, text: str) -> None:
    """Write a UTF-8 text file as `replacing` does."""
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


def write_all(file: IO[bytes], data: bytes) -> None:
    """Write all of the data to an unbuffered file: a disk that fills up takes a part first and then fails."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def check_made(path: str | os.PathLike, mark: str) -> None:
    """Raise ValueError where a file is there without the mark of what a command writes: it is somebody's, and stays."""
    check_regular(path)
    if expanded(path).exists() and (text := read_text(path)).strip() and mark not in text:
        raise ValueError(f"{os.fspath(path)}: is there, and this command did not write it; give another name")


def lock(descriptor: int, wait: bool = False) -> bool:
    """Lock an open file or directory until it is closed; whether it was free, or is now that it was waited for.

    Where there are no locks, it is.
    """
    try:
        import fcntl
    except ImportError:  # no such module on Windows
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def _delete_unfinished(directory: Path, prefix: str) -> None:
    """Delete what a killed writer left; one that still writes holds its lock."""
    pattern = re.compile(re.escape(prefix) + r"[0-9a-f]{16}\.writing")
    for name in os.listdir(directory):
        if not pattern.fullmatch(name):
            continue
        with contextlib.suppress(OSError):
            descriptor = os.open(directory / name, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
            try:
                dead = lock(descriptor)
            finally:
                os.close(descriptor)
            if dead:
                os.unlink(directory / name)


def read_text(path: str | os.PathLike) -> str:
    """The UTF-8 text of a file or a pipe, without the mark (BOM) that some programs put before it.

    Raises:
        ValueError: it is not UTF-8, or a device; OSError: it cannot be read.
    """
    refuse_device(path)
    try:
        return expanded(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{os.fspath(path)}: is not UTF-8 text ({error.reason} at byte {error.start})") from error


def user_cache_directory() -> Path:
    """Where this system keeps what programs can make again."""
    if os.environ.get("XDG_CACHE_HOME"):
        base = Path(os.environ["XDG_CACHE_HOME"])
    elif sys.platform == "darwin":
        base = Path("~/Library/Caches").expanduser()
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", "~/AppData/Local")).expanduser()
    else:
        base = Path("~/.cache").expanduser()
    return base / "lowrank-kv-jax"
