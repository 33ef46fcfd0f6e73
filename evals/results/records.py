"""Results as one JSON object a line."""

import contextlib
import functools
import json
import os
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

from lowrank_kv_jax.checks.json_objects import parse_json
from lowrank_kv_jax.files import check_regular, expanded, lock, naming, read_text, write_all

FIELDS = (
    "command", "model", "method", "task", "length", "samples", "seed", "protocol", "score", "cache_bytes",
    "full_cache_bytes", "bytes_per_token", "bytes_by_kind", "ttft_s", "decode_tokens_per_s", "peak_bytes",
    "device", "versions",
)
"""Every record has these; null where one does not apply. A task may add its own."""

_PACKAGES = ("lowrank-kv-jax", "jax", "jaxlib", "numpy")


def make_record(command: str, **values: Any) -> dict[str, Any]:
    """A record with all `FIELDS`; device, peak memory and versions are filled in."""
    record: dict[str, Any] = dict.fromkeys(FIELDS)
    record |= {"command": command, "device": device(), "peak_bytes": peak_bytes(), "versions": versions()}
    return record | values


def append_record(path: str | os.PathLike, record: dict[str, Any]) -> None:
    """Append a record to a file and wait until it is on the disk.

    The line is written by one call, so that a run that is killed leaves at most one incomplete line, the
    last, which `read_records` skips and the next append does not run into. Several programs may append to one file: each
    waits until the line of another is written. Of several processes that run in step (`jax.distributed`), the first one
    writes.
    """
    import jax

    if jax.process_index() != 0:
        return
    line = json.dumps(record, allow_nan=False, sort_keys=False) + "\n"
    path = expanded(path)
    check_regular(path)
    with naming(path), _alone(path) as file:
        end = file.seek(0, os.SEEK_END)
        if end:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                line = "\n" + line
        try:
            write_all(file, line.encode())
            os.fsync(file.fileno())
        except OSError:
            file.truncate(end)  # a full disk: half a line is none
            raise


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[IO[bytes]]:
    """The file to append to, unbuffered, while no other process appends; made where it is not there."""
    while True:
        with open(path, "ab+", buffering=0) as file:
            lock(file.fileno(), wait=True)
            # else it was deleted while this process waited (`check_writable`): once more
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                yield file
                return


def read_records(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The records of a file in order.

    An incomplete last line, which a killed run leaves behind, is skipped; so are other lines that hold no record, and a
    line on standard error says how many.

    Raises:
        OSError: the file cannot be read; ValueError: it is not UTF-8, or a device.
    """
    *lines, last = read_text(path).split("\n")
    found = {number: _record(line) for number, line in enumerate(lines, start=1) if line.strip()}
    bad = [number for number, record in found.items() if record is None]
    if bad:
        warn(f"{path}: lines skipped that hold no record: {len(bad)}, the first is line {bad[0]}")
    return [record for record in (*found.values(), _record(last)) if record is not None]


def _record(line: str) -> dict[str, Any] | None:
    """The JSON object of a line; NaN, which no JSON knows, makes it none."""
    try:
        record = parse_json(line, parse_constant=_no_number)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _no_number(name: str) -> None:
    raise ValueError(f"{name}: not a number of JSON")


@functools.cache
def warn(message: str) -> None:
    """One line on standard error, once in a process."""
    print(f"lowrank-kv: warning: {message}", file=sys.stderr)


def check_writable(path: str | os.PathLike) -> None:
    """Raise OSError, or ValueError where it is no regular file, now rather than after minutes of measuring if nothing can
    be appended to `path`.

    A file that was not there is not left behind.
    """
    check_regular(path)
    target = expanded(path).resolve()  # through links: what is created is removed, not a link to it
    new = not target.exists()
    with open(target, "ab") as file:
        # what another process appended meanwhile stays; of processes that run in step, another may have been faster
        if new and lock(file.fileno()) and not os.fstat(file.fileno()).st_size:
            target.unlink(missing_ok=True)


def check_appendable(path: str | os.PathLike) -> None:
    """As `check_writable`, and raise ValueError where the file holds something and no record: it is another's."""
    check_writable(path)
    if not expanded(path).exists():
        return
    lines = [line for line in read_text(path).split("\n") if line.strip()]
    known = any({"command", "versions"} <= (_record(line) or {}).keys() for line in lines)  # of `make_record`
    cut = lines and lines[-1].startswith('{"command"') and _record(lines[-1]) is None  # the first, of a killed run
    if lines and not known and not cut:
        raise ValueError(f"{os.fspath(path)}: holds no records of this program; give another file")


@functools.cache
def versions() -> dict[str, str]:
    """Of Python and of the packages that decide a result."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def device() -> str:
    """The kind and number of the devices that JAX computes on."""
    import jax

    devices = jax.devices()
    kind = f"{devices[0].platform}:{devices[0].device_kind}"
    cores = f", {os.cpu_count()} cores" if devices[0].platform == "cpu" else ""
    return f"{len(devices)} x {kind}{cores}"


def peak_bytes() -> int | None:
    """The most memory the first device has held so far; on a CPU, which does not say, the most this process has.

    None where neither is known. It never falls: of a run, the first record that reaches the maximum names its cause.
    """
    import jax

    device = jax.local_devices()[0]
    stats = device.memory_stats()
    if stats:
        return stats.get("peak_bytes_in_use")
    if device.platform != "cpu":
        return None
    try:
        import resource
    except ImportError:  # no such module on Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
