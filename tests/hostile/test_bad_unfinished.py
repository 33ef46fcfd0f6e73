"""Unfinished calibrations by the table: how the file is written, and words of the refusal."""

import zipfile

import numpy as np
import pytest
from refusing import refused

from lowrank_kv_jax.calibration.checkpoint_sums import CheckpointedSums, _seal

NAN = float("nan")


def archive(*members):
    def write(path):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as held:
            for name, content in members:
                held.writestr(name, content)
    return write


def arrays(seal=True, **held):
    """An archive of arrays, with the digest that it should have."""
    def write(path):
        own = {name: np.asarray(array) for name, array in ({"key": "{}", "done": 1} | held).items() if array is not None}
        np.savez(path, allow_pickle=True, **(own | {"seal": np.array(_seal(own))} if seal else own))
    return write


def content(data):
    return lambda path: path.write_bytes(data)


TABLE = (
    ("nothing", content(b""), "no unfinished calibration"),
    ("half a zip", content(b"PK\x03\x04" + bytes(50)), "File is not a zip file"),
    ("text", content(b"sums"), "File is not a zip file"),
    ("a directory", lambda path: path.mkdir(), "is a directory; give a regular file"),
    ("no member", archive(), "the field 'seal' is missing"),
    ("no array", archive(("seal.npy", b"no array"), ("key.npy", b"no array")), "no unfinished calibration"),
    ("a bomb", archive(("k.npy", bytes(10**7))), "an array is larger than the file"),
    ("pickles", arrays(key=np.array([{}], object)), "Object arrays cannot be loaded when allow_pickle=False"),
    ("of an older version", arrays(seal=False), "the field 'seal' is missing"),
    ("another digest", lambda path: np.savez(path, seal="0" * 64, key="{}", done=1), "seal=000000000000: is not that of its arrays"),
    ("no key", arrays(key=None), "the field 'key' is missing"), ("no count", arrays(done=None), "the field 'done' is missing"),
    ("nothing done", arrays(done=0), "done=0: must be at least 1"), ("less", arrays(done=-1), "done=-1: must be at least 1"),
    ("a text as count", arrays(done="many"), "invalid literal for int() with base 10: 'many'"),
    ("integers", arrays(k=np.arange(3)), "sums finite float64"), ("not a number", arrays(k=np.full(3, NAN)), "sums finite float64"),
    ("infinite", arrays(k=np.full(3, np.inf)), "sums finite float64"), ("float32", arrays(k=np.ones(3, np.float32)), "sums finite float64"),
    ("another model", arrays(key='{"of": "y"}'), 'holds the unfinished calibration of {"of": "y"}, not of {}'),
)


@pytest.mark.parametrize("write, words", [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_sums(write, words, tmp_path):
    write(tmp_path / "sums.npz")
    refused(lambda: CheckpointedSums(tmp_path / "sums.npz", {}).load(), "sums.npz: ", words)


def test_a_sum_that_is_missing_is_not_begun_anew(tmp_path):
    sums = CheckpointedSums(tmp_path / "sums.npz", {})
    sums.add("k", np.ones(2))
    sums.add("v", np.ones(2))
    sums.save(3)
    with np.load(tmp_path / "sums.npz") as held:
        others = {name: held[name] for name in held.files if name != "v"}
    np.savez(tmp_path / "sums.npz", **others)
    refused(lambda: CheckpointedSums(tmp_path / "sums.npz", {}).load(), "is not that of its arrays")
