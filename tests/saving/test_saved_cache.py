"""Caches saved and restored."""

import dataclasses
import types

import chex
import jax
import numpy as np
import pytest
from helpers import BLOCK, CAPACITY, PLAIN, PROMPT, bases_for, model, prompts, small_configuration

from lowrank_kv_jax.generation.forward import decode_step, prefill
from lowrank_kv_jax.generation.generate import Generation
from lowrank_kv_jax.method.accounting import cache_bytes
from lowrank_kv_jax.method.cache import fork
from lowrank_kv_jax.method.layout import Layout
from lowrank_kv_jax.methods import REGISTRY
from lowrank_kv_jax.saving.checkpoint import METADATA, load_metadata
from lowrank_kv_jax.saving.saved_cache import abstract_cache, load_cache, save_cache
from lowrank_kv_jax.storage.sharding import make_mesh

MODEL = types.SimpleNamespace(name="tiny", config=PLAIN, fingerprint="f" * 64)


def made_by(method):
    bases = bases_for(method, PLAIN)
    cache, _ = prefill(
        method, PLAIN, model().params, prompts(2, PROMPT), bases=bases, capacity=CAPACITY, block=BLOCK
    )
    return cache, bases


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("name", ["ojakv", "snapkv"])  # for the others tests/method/test_contract.py compares the leaves
def test_a_restored_cache_continues_as_the_saved_one(name, compress, tmp_path):
    method = small_configuration(REGISTRY[name])
    cache, bases = made_by(method)
    save_cache(tmp_path / "cache", cache, MODEL, bases=bases, compress=compress)
    restored = load_cache(tmp_path / "cache", method, MODEL, bases=bases)
    chex.assert_trees_all_equal_structs(restored, cache)
    assert cache_bytes(restored) == cache_bytes(cache) == cache_bytes(abstract_cache(method, cache.layout, bases))
    token = prompts(2, 1)[:, 0]
    for ours, theirs in zip(
        *(jax.tree.leaves(decode_step(method, PLAIN, model().params, fork(c), token, bases=bases))
          for c in (restored, cache)), strict=True,
    ):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_a_cache_in_8_bits_is_loaded_again(dtype, compress, tmp_path):
    cache, _ = prefill("full", PLAIN, model().params, prompts(2, PROMPT), capacity=CAPACITY, block=BLOCK, dtype=dtype)
    save_cache(tmp_path / "cache", cache, MODEL, compress=compress)
    chex.assert_trees_all_equal(load_cache(tmp_path / "cache", "full", MODEL), cache)


def test_a_dtype_that_nobody_could_load_is_not_saved(tmp_path):
    cache, _ = prefill("full", PLAIN, model().params, prompts(2, PROMPT), dtype="float8_e4m3fnuz")
    with pytest.raises(ValueError, match="cache of dtype float8_e4m3fnuz: caches are saved in float16, "):
        save_cache(tmp_path / "cache", cache, MODEL)
    assert not list(tmp_path.iterdir())


def test_a_model_without_a_fingerprint_is_told(tmp_path):
    cache, _ = prefill("full", PLAIN, model().params, prompts(2, PROMPT))
    with pytest.raises(ValueError, match="has no name, fingerprint; must be what `load_model` returned"):
        save_cache(tmp_path / "cache", cache, types.SimpleNamespace(config=PLAIN, params={}, tokenizer=None))


def test_both_forms_are_laid_out_over_a_mesh_alike(tmp_path):
    method, mesh = small_configuration(REGISTRY["transform"]), make_mesh("data=1,model=1")
    cache, bases = made_by(method)
    for compress in (False, True):
        save_cache(tmp_path / str(compress), cache, MODEL, bases=bases, compress=compress)
    plain, coded = (load_cache(tmp_path / str(form), method, MODEL, bases=bases, mesh=mesh) for form in (False, True))
    assert plain.layout == coded.layout and plain.layout.mesh is not None
    for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(coded), strict=True):
        assert one.sharding == other.sharding and one.sharding.mesh == mesh
        np.testing.assert_array_equal(one, other)


def test_a_save_replaces_one_of_the_other_form(tmp_path):
    method = small_configuration(REGISTRY["full"])
    cache, _ = made_by(method)
    for compress in (False, True, True, False):
        save_cache(tmp_path / "cache", cache, MODEL, compress=compress)
        chex.assert_trees_all_equal(load_cache(tmp_path / "cache", method, MODEL), cache)
        assert len(list((tmp_path / "cache").iterdir())) == 2


def test_refusals_name_the_reason(tmp_path):
    method = small_configuration(REGISTRY["ojakv"])
    cache, bases = made_by(method)
    path = tmp_path / "cache"
    save_cache(path, cache, MODEL, bases=bases)
    other = dataclasses.replace(method, rank=0.25)
    with pytest.raises(ValueError, match="was made by"):
        load_cache(path, other, MODEL, bases=bases_for(other, PLAIN))
    stranger = types.SimpleNamespace(name="other", config=PLAIN, fingerprint="0" * 64)
    with pytest.raises(ValueError, match="belongs to model 'tiny'"):
        load_cache(path, method, stranger, bases=bases)
    with pytest.raises(ValueError, match="other calibrated bases"):
        load_cache(path, method, MODEL, bases=jax.tree.map(lambda u: u[..., ::-1], bases))
    with pytest.raises(FileNotFoundError, match="no saved cache"):
        load_cache(tmp_path / "nothing", method, MODEL, bases=bases)
    (path / METADATA).write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        load_metadata(path, "cache")


def test_over_how_many_devices_slots_were_cut_is_told(tmp_path, monkeypatch):
    method = small_configuration(REGISTRY["kivi"])
    cache, _ = made_by(method)
    with monkeypatch.context() as cut:
        cut.setattr(Layout, "token_devices", 4)
        save_cache(tmp_path / "cut", cache, MODEL)
    with pytest.raises(ValueError, match="was saved over tokens=4 devices: give a mesh with as many, not tokens=1"):
        load_cache(tmp_path / "cut", method, MODEL)


def test_what_could_not_be_loaded_is_not_saved(tmp_path):
    method = small_configuration(REGISTRY["ojakv"])
    cache, bases = made_by(method)
    save_cache(tmp_path / "cache", cache, MODEL, bases=bases)
    with pytest.raises(ValueError, match="needs calibrated bases"):
        save_cache(tmp_path / "cache", cache, MODEL)
    with pytest.raises(ValueError, match="cache is a Generation: must be a Cache"):
        save_cache(tmp_path / "cache", Generation([], [], cache, None), MODEL, bases=bases)
    load_cache(tmp_path / "cache", method, MODEL, bases=bases)


def test_nothing_is_overwritten_or_left_half_written(tmp_path, monkeypatch):
    method = small_configuration(REGISTRY["full"])
    cache, _ = made_by(method)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")
    with pytest.raises(FileExistsError, match="notes.txt.*choose another place"):
        save_cache(tmp_path / "mine", cache, MODEL)
    save_cache(tmp_path / "cache", cache, MODEL)
    monkeypatch.setattr("lowrank_kv_jax.saving.checkpoint.version", lambda name: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_cache(tmp_path / "cache", cache, MODEL)
    monkeypatch.undo()
    load_cache(tmp_path / "cache", method, MODEL)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cache", "mine"]
