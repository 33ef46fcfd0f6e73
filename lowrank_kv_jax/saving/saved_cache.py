"""Compressed caches on disk: a conversation saved today and continued tomorrow."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from lowrank_kv_jax.checks.json_objects import check_fields
from lowrank_kv_jax.checks.models import check_model
from lowrank_kv_jax.checks.shown import short
from lowrank_kv_jax.files import behind_links
from lowrank_kv_jax.method import Layout, Part
from lowrank_kv_jax.method.cache import Cache
from lowrank_kv_jax.methods.compose import machine_of
from lowrank_kv_jax.methods.group_bases import bases_of_group
from lowrank_kv_jax.methods.parse import as_method
from lowrank_kv_jax.saving.checkpoint import METADATA, load_metadata
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

KIND = "cache"
_CUT = "token_devices"
"""Over how many devices slots are cut, which round up to them; earlier saves do not say it."""
_FIELDS = {"method": str, "model": str, "fingerprint": str, "bases": (str, type(None)), "layout": dict}


def save_cache(path: str | Path, cache: Cache, model: Any, *, bases: Any = None, compress: bool = False) -> None:
    """Save a cache of `model` (a `LoadedModel`) to the directory `path`; those of a decoder of your own: `save_layers`.

    A conversation goes on behind `Generation.last`, which no cache holds: keep it, too, and put it before the next turn.

    Args:
        bases: those that the cache was made with; not saved, but known again.
        compress: bytes that are alike lie together, which zstd codes in fewer; `load_cache` gives the same cache back, to
            the bit. The arrays pass through the memory of the host, and only this library reads them again.

    Raises:
        ValueError: what is no cache, one of another model, or no bases where its method needs them: `load_cache` would
            refuse whatever it is given.
    """
    if not isinstance(cache, Cache):
        raise ValueError(f"cache is a {type(cache).__name__}: must be a Cache, such as `.cache` of a Generation")
    check_model(model, "config", "name", "fingerprint")
    if cache.layout.spec != model.config.attention:
        raise ValueError(f"this cache is not of model {model.name!r}: its attention differs")
    bases_of_group(cache.method, cache.layout.spec, bases)
    metadata = {
        "method": repr(cache.method), "model": model.name, "fingerprint": model.fingerprint, "bases": digest_of(bases),
        "layout": layout_fields(cache.layout), _CUT: cache.layout.token_devices,
    }
    save_state(path, KIND, cache, metadata, compress)


def load_cache(
    path: str | Path, method: Part | str, model: Any, *, bases: Any = None, mesh: jax.sharding.Mesh | None = None
) -> Cache:
    """Load a cache that `method` made for `model`, compressed or not.

    Args:
        bases: those that the cache was made with, where the method is calibrated.
        mesh: lay it out over these devices.

    Raises:
        ValueError: it belongs to another method, model or bases, or its arrays do not fit.
    """
    method, metadata = as_method(method), load_metadata(path, KIND)
    check_model(model, "config", "name", "fingerprint")
    file = behind_links(path) / METADATA
    check_fields(file, metadata, _FIELDS)
    if metadata["fingerprint"] != model.fingerprint:
        raise ValueError(f"{path}: this cache belongs to model {short(metadata['model'])} with other weights "
                         f"({metadata['fingerprint'][:12]}), not to {model.name!r} ({model.fingerprint[:12]})")
    if metadata["method"] != repr(method):
        raise ValueError(f"{path}: this cache was made by {metadata['method']:.500}, not by {method!r}")
    if metadata["bases"] != digest_of(bases):
        raise ValueError(f"{path}: this cache was made with other calibrated bases than those given")
    layout = read_layout(file, metadata["layout"], model.config.attention, mesh)
    if (made := metadata.get(_CUT, layout.token_devices)) != layout.token_devices:
        raise ValueError(f"{path}: this cache was saved over tokens={short(made)} devices: give a mesh with as many, not "
                         f"tokens={layout.token_devices}")
    return hold(load_state(path, metadata, _abstract_arrays(method, layout, bases)), layout.mesh)


def abstract_cache(method: Part, layout: Layout, bases: Any = None) -> Cache:
    """The shapes, dtypes and shardings of a cache, nothing allocated; `cache_bytes` reads it as it reads a cache."""
    return hold(_abstract_arrays(method, layout, bases), layout.mesh)


def _abstract_arrays(method: Part, layout: Layout, bases: Any) -> Cache:
    """The same with bfloat16 everywhere, as it is saved."""
    bases = bases_of_group(method, layout.spec, bases)
    layouts = (layout.of_group(group) for group in method.layer_groups(layout.spec))  # of a window no moments are kept
    groups = tuple(jax.eval_shape(lambda one=one, b=b: lay_out(machine_of(method).init(one, b), layout.tokens))
                   for one, b in zip(layouts, bases, strict=True))
    rows: Any = jax.ShapeDtypeStruct((layout.batch,), jnp.int32)
    scalar: Any = jax.ShapeDtypeStruct((), jnp.int32)
    return on_mesh(layout.mesh, Cache(groups, rows, rows, scalar, method, layout))
