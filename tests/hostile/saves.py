"""Small saves, and copies of them with one field of their description changed."""

import json
import shutil
import types

import helpers
import jax.numpy as jnp

import lowrank_kv_jax as lkv
from lowrank_kv_jax import methods
from lowrank_kv_jax.calibration.corpus import Corpus
from lowrank_kv_jax.generation.forward import prefill
from lowrank_kv_jax.saving.checkpoint import METADATA, _seal
from lowrank_kv_jax.saving.saved_bases import load_bases, save_bases
from lowrank_kv_jax.saving.saved_cache import load_cache, save_cache

MODEL = types.SimpleNamespace(name="tiny", config=helpers.PLAIN, fingerprint="f" * 64)
OJA, FULL = methods.OjaKV(rank=4), methods.Full()


def bases_at(path):
    save_bases(path, helpers.bases_for(OJA), MODEL, OJA, corpus=Corpus.of(["text"]), settings={"length": 64, "windows": 2})
    return path


def cache_at(path, compress=False):
    held, _ = prefill(FULL, helpers.PLAIN, helpers.model().params, helpers.prompts(1, 8), capacity=16)
    save_cache(path, held, MODEL, compress=compress)
    return path


def plans():
    return lkv.plan_layers(FULL, helpers.PLAIN.attention, prompt=8, capacity=16)


def layers_at(path):
    q, k = jnp.ones((1, 8, 8, 8)), jnp.ones((1, 8, 4, 8))
    caches = [lkv.prefill_layer(plan, lkv.Taps(q, k, k, k)) for plan in plans()]
    lkv.save_layers(path, plans(), caches, "tiny")
    return path


KINDS = {
    "bases": (bases_at, lambda path: load_bases(path, MODEL, OJA)),
    "cache": (cache_at, lambda path: load_cache(path, FULL, MODEL)),
    "compressed": (lambda path: cache_at(path, compress=True), lambda path: load_cache(path, FULL, MODEL)),
    "layers": (layers_at, lambda path: lkv.load_layers(path, plans(), "tiny")),
}
"""By name, what makes a save at a path and what reads it."""


def description(path):
    return json.loads((path / METADATA).read_text())


def describe(path, content, seal=True):
    """Write another description, with the digest that it should have."""
    if seal:
        content["sha256"] = _seal({name: held for name, held in content.items() if name != "sha256"})
    (path / METADATA).write_text(json.dumps(content))


def changed(saved, to, place, value):
    """A copy of a save with one field of its description changed, or left out for `...`."""
    path = shutil.copytree(saved, to / "own")
    content = description(path)
    *outer, last = place
    holder = content
    for name in outer:
        holder = holder[name]
    if value is ...:
        del holder[last]
    else:
        holder[last] = value
    describe(path, content, seal=last != "sha256")
    return path
