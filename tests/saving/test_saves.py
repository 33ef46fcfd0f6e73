"""What saving leaves on the disk: never over what is not its own, never half, and nothing through a planted link."""

import concurrent.futures
import os
import random
import stat
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowrank_kv_jax.calibration import checkpoint_sums
from lowrank_kv_jax.calibration.checkpoint_sums import CheckpointedSums
from lowrank_kv_jax.cli import main
from lowrank_kv_jax.files import replacing
from lowrank_kv_jax.saving import checkpoint
from lowrank_kv_jax.saving.checkpoint import METADATA, load_arrays, load_metadata, save_arrays

SIZE = 64


def save(path, value=1.0, kind="bases"):
    save_arrays(path, kind, {"x": jnp.full((SIZE,), value)}, {"value": value})


def load(path, kind="bases"):
    metadata = load_metadata(path, kind)
    array = load_arrays(path, metadata, {"x": jax.ShapeDtypeStruct((SIZE,), jnp.float32)})["x"]
    assert float(array[0]) == metadata["value"] and bool((array == array[0]).all())
    return metadata["value"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A save that tests look at and copy."""
    path = tmp_path_factory.mktemp("saved") / "own"
    save(path)
    return path


def copy(saved, tmp_path):
    import shutil

    return shutil.copytree(saved, tmp_path / "own")


def names(path):
    return sorted(p.relative_to(path).as_posix() for p in path.rglob("*"))


# ---- what is not its own ------------------------------------------------------------------------------------------


def _notes(own):
    (own / "NOTES.md").write_text("mine")


def _notes_among_arrays(own):
    (next(own.glob("arrays-*")) / "d" / "NOTES.md").write_text("mine")


def _folder(own):
    (own / "mine").mkdir()


def _link(own):
    (own / "arrays-0123456789abcdef").symlink_to(own.parent)


def _damage(own):
    (own / METADATA).write_text("[]")


def _only_arrays(own):
    (own / METADATA).unlink()
    next(own.glob("arrays-*")).rename(own / "arrays")


@pytest.mark.parametrize("change", (_notes, _notes_among_arrays, _folder, _link, _damage, _only_arrays))
def test_a_directory_that_holds_more_than_a_save_is_refused_and_stays(saved, tmp_path, change):
    own = copy(saved, tmp_path)
    change(own)
    before = names(tmp_path)
    with pytest.raises(FileExistsError, match="choose another place"):
        save(own, 2.0)
    assert names(tmp_path) == before


def test_a_save_of_another_kind_is_refused_and_stays(saved, tmp_path):
    own = copy(saved, tmp_path)
    with pytest.raises(FileExistsError, match="kind='bases': must be 'cache'"):
        save(own, 2.0, kind="cache")
    assert load(own) == 1.0


def test_calibrate_refuses_before_it_loads_a_model(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("lowrank_kv_jax.models.load.load_model", None)
    out = tmp_path / "out"
    out.mkdir()
    (out / "NOTES.md").write_text("mine")
    assert main(["calibrate", "--method", "ojakv", "--out", str(out)]) == 2
    assert "NOTES.md" in capsys.readouterr().err and (out / "NOTES.md").read_text() == "mine"


@pytest.mark.parametrize("name", ("talk[1]", "a]b", "[exp]/talk", "a\\b"))
def test_a_place_that_cannot_be_read_again_is_refused_and_others_serve(tmp_path, name):
    if "[" in name or "\\" in name:
        with pytest.raises(ValueError, match="with which Orbax cannot read what it wrote; choose another place"):
            save(tmp_path / name)
        assert names(tmp_path) == []
    else:
        save(tmp_path / name)
        assert load(tmp_path / name) == 1.0


def test_what_cannot_be_read_again_is_no_save(saved, tmp_path, monkeypatch):
    own = copy(saved, tmp_path)
    before = names(tmp_path)
    monkeypatch.setattr(checkpoint, "_UNREADABLE", "")
    hidden = tmp_path / "[1]"
    own.rename(hidden)
    with pytest.raises(OSError, match="what Orbax wrote cannot be read"):
        save(hidden, 2.0)
    hidden.rename(own)
    assert names(tmp_path) == before and load(own) == 1.0


def test_threads_save_to_places_of_their_own(tmp_path):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: save(tmp_path / str(i % 4), float(i)), range(4)))
    assert [load(tmp_path / str(i)) for i in range(4)] == [0.0, 1.0, 2.0, 3.0]


# ---- links --------------------------------------------------------------------------------------------------------


def test_saving_onto_a_link_writes_behind_it(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "real")
    save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and load(tmp_path / "real") == 1.0
    with replacing(tmp_path / "real" / "f") as file:
        file.write(b"1")
    (tmp_path / "to").symlink_to(tmp_path / "real" / "f")
    with replacing(tmp_path / "to") as file:
        file.write(b"2")
    assert (tmp_path / "to").is_symlink() and (tmp_path / "real" / "f").read_bytes() == b"2"


@pytest.mark.parametrize("module", (checkpoint, checkpoint_sums))
def test_a_link_at_the_temporary_name_is_not_followed(tmp_path, monkeypatch, module):
    """Even one that guessed it."""
    monkeypatch.setattr("secrets.token_hex", lambda count: "0" * 2 * count)
    (tmp_path / "target").write_text("precious")
    own = tmp_path / "own"
    if module is checkpoint:
        own.mkdir()
        (own / f".{METADATA}.{16 * '0'}.writing").symlink_to(tmp_path / "target")
        with pytest.raises(FileExistsError):
            save(own)
    else:
        scratch = tmp_path / f".own.npz.{16 * '0'}.writing"
        scratch.symlink_to(tmp_path / "target")
        sums = CheckpointedSums(tmp_path / "own.npz", {})
        with pytest.raises(FileExistsError):
            sums.save(1)
        old = tmp_path / "own.npz.writing"  # the name of earlier versions
        scratch.rename(old)
        sums.save(1)
        assert sums.load() == 1 and old.is_symlink()
    assert (tmp_path / "target").read_text() == "precious"


# ---- what is left -------------------------------------------------------------------------------------------------


def test_modes_follow_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        save(tmp_path / "own")
        CheckpointedSums(tmp_path / "sums.npz", {}).save(1)
    finally:
        os.umask(before)
    for path in tmp_path.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o750 if path.is_dir() else 0o640), path


def test_the_next_save_collects_what_a_killed_one_left(saved, tmp_path):
    own = copy(saved, tmp_path)
    for left in ("arrays-0123456789abcdef", "arrays-0123456789abcdef.orbax-checkpoint-tmp"):
        (own / left / "d").mkdir(parents=True)
        (own / left / "d" / "part").write_text("half")
    (own / f".{METADATA}.0123456789abcdef.writing").write_text("half")
    (tmp_path / ".sums.npz.0123456789abcdef.writing").write_text("half")
    save(own, 2.0)
    CheckpointedSums(tmp_path / "sums.npz", {}).save(1)
    assert load(own) == 2.0 and len(list(own.iterdir())) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["own", "sums.npz"]


def test_a_writer_that_still_writes_is_left_alone(tmp_path):
    with replacing(tmp_path / "f") as one:
        one.write(b"one")
        with replacing(tmp_path / "f") as other:
            other.write(b"other")
    assert (tmp_path / "f").read_bytes() == b"one" and names(tmp_path) == ["f"]


LOOP = """
import sys
sys.path[:0] = {folders}
from test_saves import save
for i in range(1, 10_000):
    save({path!r}, float(i))
    print(i, flush=True)
"""


def kill_while_saving(path, rng):
    """The number of the last save that was done, of a process killed at a random time after its first."""
    code = LOOP.format(folders=[str(folder) for folder in Path(__file__).parents[:2]], path=str(path))
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    with child.stdout:
        first = child.stdout.readline()
        assert first == "1\n"
        time.sleep(rng.random() * 1.5)
        child.kill()
        child.wait()
        done = [1, *map(int, child.stdout.read().split())]
    return done[-1]


@pytest.mark.parametrize("kills", (1, pytest.param(100, marks=pytest.mark.slow)))
def test_a_save_that_is_killed_leaves_the_old_or_the_new(tmp_path, kills):
    rng = random.Random(kills)
    for _ in range(kills):
        last = kill_while_saving(tmp_path / "own", rng)
        assert load(tmp_path / "own") in (last, last + 1)
    save(tmp_path / "own", 0.5)
    assert load(tmp_path / "own") == 0.5 and len(list((tmp_path / "own").iterdir())) == 2
    assert names(tmp_path)[0] == "own" and len(list(tmp_path.iterdir())) == 1


def test_a_save_that_fails_leaves_the_old_one_and_names_the_place(saved, tmp_path, monkeypatch):
    own = copy(saved, tmp_path)
    before = names(tmp_path)

    def full(path, text):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(checkpoint, "write_text", full)
    with pytest.raises(OSError, match=METADATA):
        save(own, 2.0)
    assert names(tmp_path) == before and load(own) == 1.0
    with pytest.raises(OSError):
        save(tmp_path / "new")
    assert names(tmp_path) == before


def test_sums_that_do_not_fit_on_the_disk_leave_the_old_ones(tmp_path, monkeypatch):
    path = tmp_path / "sums.npz"
    sums = CheckpointedSums(path, {})
    sums.add("k", np.ones(4))
    sums.save(1)

    def full(file, **_):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="No space left on device: .*sums.npz'"):
        sums.save(2)
    assert names(tmp_path) == ["sums.npz"] and CheckpointedSums(path, {}).load() == 1


ELSEWHERE = """
import sys
sys.path[:0] = {folders}
import jax
from test_saves import save
with jax.default_device(jax.devices()[1]):
    save({path!r}, 7.0)
"""


def test_what_was_saved_on_a_device_that_is_not_here_loads(tmp_path):
    code = ELSEWHERE.format(folders=[str(folder) for folder in Path(__file__).parents[:2]], path=str(tmp_path / "own"))
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    subprocess.run([sys.executable, "-c", code], env=env, check=True)
    assert load(tmp_path / "own") == 7.0
