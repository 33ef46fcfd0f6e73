"""Bases of an earlier command: found where all that decides them is the same, and never in the way."""

import os

import helpers
import jax
import numpy as np
import pytest

from lowrank_kv_jax import methods
from lowrank_kv_jax.calibration.corpus import Corpus
from lowrank_kv_jax.evals.asking import methods as asking
from lowrank_kv_jax.saving import checkpoint, kept_bases
from lowrank_kv_jax.saving.kept_bases import KeptBases

METHOD, CORPUS, SETTINGS = methods.OjaKV(rank=4), Corpus.of(["some text"]), {"length": 8, "windows": 1, "seed": 0}


@pytest.fixture
def place(monkeypatch, tmp_path):
    monkeypatch.setattr(kept_bases, "user_cache_directory", lambda: tmp_path)
    return tmp_path / "bases"


def kept(model=None, corpus=CORPUS, settings=SETTINGS, dtype="float32"):
    return KeptBases(model or helpers.model(), corpus, settings, dtype)


def equal(one, two):
    return jax.tree.structure(one) == jax.tree.structure(two) and all(
        np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True))


def test_what_was_kept_is_found_again(place):
    bases = helpers.bases_for(METHOD)
    assert kept().find(METHOD) is None
    kept().keep(METHOD, bases)
    assert equal(kept().find(METHOD), bases)


@pytest.mark.parametrize("other", (
    {"corpus": Corpus.of(["another text"])}, {"settings": SETTINGS | {"seed": 1}}, {"dtype": "bfloat16"}, "sources", "rank",
), ids=str)
def test_whatever_decides_them_tells_them_apart(place, monkeypatch, other):
    kept().keep(METHOD, helpers.bases_for(METHOD))
    if other == "sources":
        monkeypatch.setattr(kept_bases, "_sources", lambda: "changed")
    asked = methods.OjaKV(rank=2) if other == "rank" else METHOD
    assert kept(**other if isinstance(other, dict) else {}).find(asked) is None


def test_no_calibration_runs_what_may_change_without_one():
    root = kept_bases.Path(kept_bases.__file__).parents[1]
    folders = {path.name for path in root.iterdir() if path.is_dir()} - kept_bases.AFTERWARDS
    names = [f"lowrank_kv_jax.{folder}" for folder in kept_bases.AFTERWARDS]
    found = [path for folder in folders for path in (root / folder).rglob("*.py")
             if any(f"import {name}" in text or f"from {name}" in text for text in [path.read_text()] for name in names)]
    assert len(folders) > 10 and not found


def test_a_method_of_ones_own_is_calibrated_each_time(place):
    own = type("Own", (methods.OjaKV,), {"__module__": "notebook"})(rank=4)
    kept().keep(own, helpers.bases_for(METHOD))
    assert not place.exists() and kept().find(own) is None


def test_damage_is_forgotten(place):
    bases = helpers.bases_for(METHOD)
    kept().keep(METHOD, bases)
    (entry,) = place.iterdir()
    next(path for path in entry.rglob("*") if path.is_file()).write_bytes(b"")
    assert kept().find(METHOD) is None and not entry.exists()
    kept().keep(METHOD, bases)
    assert equal(kept().find(METHOD), bases)


def test_what_another_command_is_writing_stays(place):
    """Its description comes last; until then it holds the directory's lock."""
    kept().keep(METHOD, helpers.bases_for(METHOD))
    (entry,) = place.iterdir()
    (entry / "lowrank_kv.json").unlink()
    with checkpoint._alone(entry):
        assert kept().find(METHOD) is None and entry.exists()
    assert kept().find(METHOD) is None and not entry.exists()  # of a command that was killed


def test_no_place_is_no_error(monkeypatch):
    monkeypatch.setattr(kept_bases, "user_cache_directory", lambda: kept_bases.Path(os.devnull))
    kept().keep(METHOD, helpers.bases_for(METHOD))
    assert kept().find(METHOD) is None


def test_the_oldest_go(place, monkeypatch):
    monkeypatch.setattr(kept_bases, "MOST", 2)
    (place / "notes").mkdir(parents=True)
    for seed in range(4):
        kept(settings=SETTINGS | {"seed": seed}).keep(METHOD, helpers.bases_for(METHOD))
    assert len(list(place.iterdir())) == 3 and (place / "notes").is_dir()
    assert kept(settings=SETTINGS | {"seed": 0}).find(METHOD) is None
    assert kept(settings=SETTINGS | {"seed": 3}).find(METHOD) is not None


def test_an_evaluation_calibrates_once(place, monkeypatch):
    ran = []
    monkeypatch.setattr(asking, "moments_of", lambda model, missing, *_, **__: ran.append(list(missing)))
    monkeypatch.setattr(asking, "fit_bases", lambda model, method, *_: helpers.bases_for(method))
    asked = {"full": methods.Full(), "ojakv:rank=4": METHOD}
    first = asking.bases_of(helpers.model(), asked, CORPUS)
    second = asking.bases_of(helpers.model(), asked | {"ojakv:rank=2": methods.OjaKV(rank=2)}, CORPUS)
    assert ran == [["ojakv:rank=4"], ["ojakv:rank=2"]]
    assert set(first) == {"ojakv:rank=4"} and equal(first["ojakv:rank=4"], second["ojakv:rank=4"])
