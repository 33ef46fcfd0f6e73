"""A disk that fills up, by a limit on the size of files: the file is named, and nothing half-written is left."""

import contextlib
import json
import logging
import subprocess
import sys
import threading

import numpy as np
import pytest
from commands import refused_command
from saves import KINDS, MODEL

from lowrank_kv_jax.calibration.checkpoint_sums import CheckpointedSums
from lowrank_kv_jax.cli import main
from lowrank_kv_jax.evals.results.records import append_record, make_record, read_records
from lowrank_kv_jax.files import replacing, write_text
from lowrank_kv_jax.saving.saved_cache import save_cache

resource = pytest.importorskip("resource")

@pytest.fixture
def orbax_threads(monkeypatch):
    """What they log and what nobody takes from them, behind the error that is raised, is not for pytest."""
    for name in ("absl", "asyncio"):
        monkeypatch.setattr(logging.getLogger(name), "filters", [lambda _: False])
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)


@contextlib.contextmanager
def full_at(size):
    """No file grows beyond so many bytes: writing more is an OSError, as on a full disk.

    What is imported meanwhile is not compiled to a file: Python would leave half of one, which no later import can read.
    """
    before, bytecode = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = bytecode


def names(path):
    return sorted(file.relative_to(path).as_posix() for file in path.rglob("*"))


def fails_naming(path, write, size=100):
    with full_at(size), pytest.raises(OSError) as failed:
        write()
    assert str(path) in str(failed.value)


@pytest.fixture
def records(tmp_path):
    path = tmp_path / "r.jsonl"
    scored = {"command": "c", "model": "m", "protocol": "p", "length": 8, "bytes_per_token": 9.0}
    path.write_text("".join(json.dumps(scored | {"method": method, "task": "t", "index": i, "score": i}) + "\n"
                            for method in ("full", "kivi") for i in range(4)))
    return path


@pytest.mark.parametrize("old", (None, "old"))
def test_a_file_is_whole_or_as_it_was(tmp_path, old):
    path = tmp_path / "x.txt"
    if old:
        path.write_text(old)
    fails_naming(path, lambda: write_text(path, "x" * 10_000))
    assert names(tmp_path) == (["x.txt"] if old else []) and (not old or path.read_text() == old)


def test_an_error_of_another_file_meanwhile_is_not_hidden(tmp_path):
    with pytest.raises(KeyError), replacing(tmp_path / "x") as file:
        file.write(b"half")
        raise KeyError
    assert not names(tmp_path)


def test_half_a_record_is_none(tmp_path):
    path, record = tmp_path / "x.jsonl", make_record("c", task="t" * 500)
    append_record(path, record)
    size = path.stat().st_size
    fails_naming(path, lambda: append_record(path, record), size + 100)
    assert path.stat().st_size == size and read_records(path) == [json.loads(json.dumps(record))]


def test_sums_stay(tmp_path):
    path = tmp_path / "s.npz"
    sums = CheckpointedSums(path, {})
    sums.add("k", np.ones(2))
    sums.save(1)
    sums.add("v", np.ones(10_000))
    fails_naming(path, lambda: sums.save(2), 10_000)
    assert names(tmp_path) == ["s.npz"] and CheckpointedSums(path, {}).load() == 1


@pytest.mark.parametrize("kind", [
    kind if kind in ("bases", "compressed") else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS])
def test_saves_stay(kind, tmp_path, orbax_threads):
    make, load = KINDS[kind]
    path = make(tmp_path / "own")
    before, held = names(tmp_path), load(path)
    fails_naming(path, lambda: make(path))
    assert names(tmp_path) == before and load(path) is not held
    fails_naming(tmp_path / "new", lambda: make(tmp_path / "new"))
    assert names(tmp_path) == before


SAVING = """
import resource
import numpy as np
from lowrank_kv_jax.cli import __main__ as cli
from lowrank_kv_jax.saving.checkpoint import save_arrays

def main():
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    try:
        save_arrays("out", "bases", {"a": np.ones(10_000), "b": np.ones(10)}, {})
    except OSError:
        return 1

cli.main = main
raise SystemExit(cli.program())
"""


def test_a_program_tells_it_once(tmp_path):
    ended = subprocess.run([sys.executable, "-B", "-c", SAVING], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 1 and ended.stderr == "" and names(tmp_path) == []


def test_a_library_silences_nothing(tmp_path, orbax_threads):
    settings = logging.root.manager.disable, sys.unraisablehook, list(logging.getLogger("absl").filters)
    fails_naming(tmp_path, lambda: KINDS["bases"][0](tmp_path / "own"))
    assert settings == (logging.root.manager.disable, sys.unraisablehook, logging.getLogger("absl").filters)


def test_a_report_leaves_no_half_of_a_picture(tmp_path, records, capsys):
    out = tmp_path / "out"
    with full_at(2000):
        code = main(["report", str(records), "--out", str(out)])
    told = capsys.readouterr().err.strip()
    assert code == 1 and told.startswith(f"lowrank-kv: error: {out}/1-pareto.png: ") and told.count("\n") == 0
    assert names(out) == []


def test_where_nothing_may_be_written(tmp_path, capsys, records):
    (tmp_path / "file").touch()
    refused = refused_command
    main(["report", str(records)])
    capsys.readouterr()
    assert main(["report", str(records), "--out", str(tmp_path / "file")]) == 2
    assert f"{tmp_path / 'file'}: " in capsys.readouterr().err
    refused(capsys, ["eval", "leaderboard", "--json", str(tmp_path / "file" / "x.jsonl")], "file/x.jsonl: Not a directory")
    assert names(tmp_path) == ["file", "r.jsonl"]
    with pytest.raises(FileExistsError, match="file is not a directory: choose another place"):
        save_cache(tmp_path / "file", KINDS["cache"][1](KINDS["cache"][0](tmp_path / "own")), MODEL)
