"""Mutants of what this library writes: they load as what was saved, or are refused."""

import json
import shutil

import jax
import numpy as np
import pytest
from mutants import VALUES, each, mutants, mutated_bytes, mutated_json, read_or_refused
from saves import KINDS, describe, description

from lowrank_kv_jax.calibration.checkpoint_sums import CheckpointedSums
from lowrank_kv_jax.saving.checkpoint import METADATA


def same(one, other, whole=True):
    """Whether two trees hold the same arrays; and, as a whole, the same sizes and names beside them."""
    alike = jax.tree.structure(one) == jax.tree.structure(other) or not whole
    return alike and all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


def damage(path, rng):
    """Something of a save: bytes of a file, a file's kind, a field of the description; whether its digest was made to fit,
    so that the description says so itself.
    """
    files = sorted(file for file in path.rglob("*") if file.is_file())
    kind = rng.choice(("bytes", "bytes", "field", "sealed", "sealed", "sealed", "kind"))
    file = rng.choice((path / METADATA, *files))
    if kind == "bytes":
        file.write_bytes(mutated_bytes(file.read_bytes(), rng))
    elif kind == "kind":
        data = file.read_bytes()
        file.unlink()
        change = rng.choice(("gone", "link", "loop", "folder", "another"))
        if change == "link":
            file.with_name("aside").write_bytes(data)
            file.symlink_to("aside")
        elif change == "loop":
            file.symlink_to(file.name)
        elif change == "folder":
            file.mkdir()
        elif change == "another":
            shutil.copy(rng.choice([other for other in files if other != file]), file)
    else:
        content = mutated_json(description(path), rng)
        try:
            describe(path, content, seal=kind == "sealed")
        except ValueError:  # what is nested too deeply has no digest
            kind = "field"
            describe(path, content, seal=False)
    return kind == "sealed"


@pytest.mark.parametrize("kind", KINDS)
@mutants
def test_saves(kind, numbers, tmp_path):
    make, load = KINDS[kind]
    whole = make(tmp_path / "whole")
    held = load(whole)

    def check(rng):
        path = shutil.copytree(whole, tmp_path / "own")
        try:
            sealed = damage(path, rng)
            with read_or_refused(path):
                assert same(load(path), held, whole=not sealed)
        finally:
            shutil.rmtree(path)

    each(numbers, check)


def _array(array, rng):
    """An array of the same name in the place of another."""
    value = rng.choice([value for value in VALUES if not isinstance(value, str) or value.isascii()])
    return rng.choice((
        lambda: array * 0, lambda: array[..., :-1], lambda: array.astype(np.float32), lambda: array.T, lambda: array[None],
        lambda: np.full(array.shape, np.nan), lambda: np.array(json.dumps(value)), lambda: np.zeros(0),
    ))()


def rewritten(path, rng):
    """An archive like the one there with its members changed, renamed or left out: each one is whole in itself."""
    with np.load(path) as held:
        arrays = {name: held[name] for name in held.files}
    name, other = rng.choice(list(arrays)), rng.choice(list(arrays))
    kind = rng.choice(("change", "change", "out", "rename", "swap", "more"))
    if kind == "change":
        arrays[name] = _array(arrays[name] if arrays[name].ndim else np.ones((2, 2)), rng)
    elif kind == "out":
        del arrays[name]
    elif kind == "rename":
        arrays[f"{name}x"] = arrays.pop(name)
    elif kind == "swap":
        arrays[name], arrays[other] = arrays[other], arrays[name]
    else:
        arrays["more"] = arrays[name]
    np.savez(path, **arrays)


@mutants
def test_unfinished_calibrations(numbers, tmp_path):
    path = tmp_path / "sums.npz"
    sums = CheckpointedSums(path, {"of": "x"})
    sums.add("k", np.arange(6.0).reshape(2, 3))
    sums.add("v", np.ones((3, 4)))
    sums.save(3)
    whole = path.read_bytes()

    def check(rng):
        path.write_bytes(whole)
        if rng.random() < 0.5:
            rewritten(path, rng)
        else:
            path.write_bytes(mutated_bytes(whole, rng))
        held = CheckpointedSums(path, {"of": "x"})
        with read_or_refused(path):
            assert held.load() == 3 and same(held.arrays, sums.arrays)

    each(numbers, check)
