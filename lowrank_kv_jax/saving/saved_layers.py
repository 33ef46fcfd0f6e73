"""Caches of a decoder of your own on disk, those of all its layers together."""

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from lowrank_kv_jax.checks.json_objects import check_fields
from lowrank_kv_jax.checks.shown import short
from lowrank_kv_jax.files import behind_links
from lowrank_kv_jax.generation.layer_cache import LayerCache, LayerPlan, check_ended, check_plan
from lowrank_kv_jax.method import Layout
from lowrank_kv_jax.methods.compose import machine_of
from lowrank_kv_jax.saving.checkpoint import METADATA, load_metadata
from lowrank_kv_jax.saving.fingerprint import fingerprint_of
from lowrank_kv_jax.saving.saved_state import (
    digest_of,
    layout_fields,
    load_state,
    on_mesh,
    read_layout,
    save_state,
)
from lowrank_kv_jax.storage.held import hold
from lowrank_kv_jax.storage.lanes import lay_out

KIND = "layers"
_FIELDS = {"method": str, "model": str, "fingerprint": str, "attention": str, "bases": (str, type(None)), "layout": dict}


def save_layers(
    path: str | Path, plans: Sequence[LayerPlan], caches: Sequence[LayerCache], weights: Any, *, compress: bool = False
) -> None:
    """Save the caches of all layers of a decoder to the directory `path`, as `save_cache` saves that of a `LoadedModel`.

    Args:
        plans: what `plan_layers` returned.
        caches: one for each plan, in their order.
        weights: of the decoder, any pytree of arrays, which is hashed; or a text that stands for them. `load_layers` asks
            for the same.
        compress: as for `save_cache`.

    Raises:
        ValueError: caches that are not one for each plan, of another plan, stacked, between two layers of a group, whose
            prompt goes on or of different layouts; weights that are no arrays.
        FileExistsError: `path` holds something else.
        OSError: it cannot be written; what was saved there before is as it was.
    """
    name, fingerprint = fingerprint_of(weights)
    layout = _check_caches(plans, caches)
    save_state(path, KIND, list(caches), {
        "method": repr(plans[0].method), "model": name, "fingerprint": fingerprint, "attention": _attention(plans),
        "bases": _bases(plans), "layout": layout_fields(layout),
    }, compress)


def load_layers(path: str | Path, plans: Sequence[LayerPlan], weights: Any) -> list[LayerCache]:
    """Load what `save_layers` saved; rows, capacity and block are those of the save, the mesh is that of the plans.

    Args:
        plans: made by `plan_layers` for the same attention, method and bases.
        weights: as given to `save_layers`.

    Raises:
        ValueError: they belong to other weights, attention, method or bases, or a file is not as it was saved.
        FileNotFoundError: nothing was saved there.
    """
    metadata = load_metadata(path, KIND)
    file = behind_links(path) / METADATA
    check_fields(file, metadata, _FIELDS)
    name, fingerprint = fingerprint_of(weights)
    if metadata["fingerprint"] != fingerprint:
        raise ValueError(f"{path}: these caches belong to {short(metadata['model'])} ({metadata['fingerprint'][:12]}), "
                         f"not to {short(name)} ({fingerprint[:12]})")
    _check_plans(plans)
    if metadata["method"] != repr(plans[0].method):
        raise ValueError(f"{path}: these caches were made by {metadata['method']:.500}, not by {plans[0].method!r}")
    if metadata["attention"] != _attention(plans):
        raise ValueError(f"{path}: these caches were made for another AttentionSpec than that of the "
                         f"{len(plans)} plans given")
    if metadata["bases"] != _bases(plans):
        raise ValueError(f"{path}: these caches were made with other calibrated bases than those of the plans given")
    layouts = [
        dataclasses.replace(
            read_layout(file, metadata["layout"], plan.layout.spec, plan.layout.mesh), window=plan.layout.window)
        for plan in plans
    ]
    abstract = [_abstract_layer(plan, layout) for plan, layout in zip(plans, layouts, strict=True)]
    return hold(load_state(path, metadata, abstract), plans[0].layout.mesh)


def _abstract_layer(plan: LayerPlan, layout: Layout) -> LayerCache:
    """Shapes, dtypes and shardings of a cache as it is saved."""
    group = jax.eval_shape(lambda: lay_out(machine_of(plan.method).init(layout, plan.bases), layout.tokens))
    rows: Any = jax.ShapeDtypeStruct((layout.batch,), jnp.int32)
    scalar: Any = jax.ShapeDtypeStruct((), jnp.int32)
    return on_mesh(layout.mesh, LayerCache(group, rows, rows, scalar, plan.method, layout))


def _check_plans(plans: Sequence[LayerPlan]) -> None:
    if not isinstance(plans, Sequence) or not plans or not all(isinstance(plan, LayerPlan) for plan in plans):
        raise ValueError(f"plans={short(plans)}: must be what plan_layers returned")


def _check_caches(plans: Sequence[LayerPlan], caches: Sequence[LayerCache]) -> Layout:
    """The layout that all caches have; raise ValueError where they are not what `load_layers` could give back."""
    _check_plans(plans)
    if len(caches) != len(plans):
        raise ValueError(f"caches of {len(caches)} plans: {len(plans)} were given")
    first = caches[0].layout
    for i, (plan, cache) in enumerate(zip(plans, caches, strict=True)):
        check_plan(plan, cache)
        check_ended(cache)
        if cache.turn:
            raise ValueError(f"caches[{i}]: stands before layer {cache.turn} of a group of {len(plan.windows)}: append "
                             "to all of them first")
        if layout_fields(cache.layout) != layout_fields(first):
            raise ValueError(f"caches[{i}].layout={layout_fields(cache.layout)}: must be that of caches[0], "
                             f"{layout_fields(first)}")
        if cache.length.shape != (first.batch,):
            raise ValueError(f"caches[{i}].length {cache.length.shape}: must be {(first.batch,)}; take stacked layers "
                             "apart")
    return first


def _attention(plans: Sequence[LayerPlan]) -> str:
    """SHA-256 of what the plans' layers attend with."""
    told = [repr((plan.layout.spec, plan.windows)) for plan in plans]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()


def _bases(plans: Sequence[LayerPlan]) -> str | None:
    return digest_of([plan.bases for plan in plans])
