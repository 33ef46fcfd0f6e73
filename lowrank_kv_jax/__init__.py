"""Compressed KV caches as a pure-functional JAX library.

Everything named here is imported when it is first used, so that `import lowrank_kv_jax` itself costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowrank_kv_jax import methods
    from lowrank_kv_jax import serving as serve
    from lowrank_kv_jax.attention.partial import AttnPartial, merge
    from lowrank_kv_jax.attention.rope import RopeSpec, apply_rope
    from lowrank_kv_jax.attention.spec import AttentionSpec, Taps
    from lowrank_kv_jax.attention.taps import check_rotation, rotary_taps
    from lowrank_kv_jax.calibration.calibrate import calibrate, collect_moments
    from lowrank_kv_jax.calibration.calibrator import Calibrator
    from lowrank_kv_jax.calibration.corpus import load_corpus
    from lowrank_kv_jax.generation.forward import decode_step, extend, prefill, refresh
    from lowrank_kv_jax.generation.generate import Generation, decode_block, generate, ingest
    from lowrank_kv_jax.generation.layer_cache import (
        LayerCache,
        LayerPlan,
        append_and_attend,
        plan_layers,
        prefill_layer,
        refresh_layer,
    )
    from lowrank_kv_jax.generation.layer_chunks import ReadChunk, add_chunk, attend_chunk, end_prompt
    from lowrank_kv_jax.generation.sampling import Sampler
    from lowrank_kv_jax.method import KVMethod, Layout, Part, Place, register
    from lowrank_kv_jax.method.accounting import CacheBytes, cache_bytes, full_cache_bytes
    from lowrank_kv_jax.method.cache import Cache, fork, insert_rows, take_rows, with_token_layout
    from lowrank_kv_jax.method.describe import describe
    from lowrank_kv_jax.method.held import Held, held_tokens, layer_bytes
    from lowrank_kv_jax.methods.compose import compose
    from lowrank_kv_jax.methods.parse import parse_method, spell_method
    from lowrank_kv_jax.models.load import LoadedModel, load_model
    from lowrank_kv_jax.saving.saved_bases import load_bases, save_bases
    from lowrank_kv_jax.saving.saved_cache import load_cache, save_cache
    from lowrank_kv_jax.saving.saved_layers import load_layers, save_layers
    from lowrank_kv_jax.selections.reread import attend_twice, prompt_twice

_HOME = {
    "attention.partial": ("AttnPartial", "merge"),
    "attention.rope": ("RopeSpec", "apply_rope"),
    "attention.spec": ("AttentionSpec", "Taps"),
    "attention.taps": ("check_rotation", "rotary_taps"),
    "calibration.calibrate": ("calibrate", "collect_moments"),
    "calibration.calibrator": ("Calibrator",),
    "calibration.corpus": ("load_corpus",),
    "generation.forward": ("decode_step", "extend", "prefill", "refresh"),
    "generation.generate": ("Generation", "decode_block", "generate", "ingest"),
    "generation.layer_cache": (
        "LayerCache", "LayerPlan", "append_and_attend", "plan_layers", "prefill_layer", "refresh_layer",
    ),
    "generation.layer_chunks": ("ReadChunk", "add_chunk", "attend_chunk", "end_prompt"),
    "generation.sampling": ("Sampler",),
    "method": ("KVMethod", "Layout", "Part", "Place", "register"),
    "method.accounting": ("CacheBytes", "cache_bytes", "full_cache_bytes"),
    "method.cache": ("Cache", "fork", "insert_rows", "take_rows", "with_token_layout"),
    "method.describe": ("describe",),
    "method.held": ("Held", "held_tokens", "layer_bytes"),
    "methods.compose": ("compose",),
    "methods.parse": ("parse_method", "spell_method"),
    "models.load": ("LoadedModel", "load_model"),
    "saving.saved_bases": ("load_bases", "save_bases"),
    "saving.saved_cache": ("load_cache", "save_cache"),
    "saving.saved_layers": ("load_layers", "save_layers"),
    "selections.reread": ("attend_twice", "prompt_twice"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "AttentionSpec", "AttnPartial", "Cache", "CacheBytes", "Calibrator", "Generation", "Held", "KVMethod", "LayerCache",
    "LayerPlan", "Layout", "LoadedModel", "Part", "Place", "ReadChunk", "RopeSpec", "Sampler", "Taps", "__version__",
    "add_chunk", "append_and_attend", "apply_rope", "attend_chunk", "attend_twice", "cache_bytes", "calibrate",
    "check_rotation", "collect_moments", "compose", "decode_block", "decode_step", "describe", "end_prompt", "extend",
    "fork", "full_cache_bytes", "generate", "held_tokens", "ingest", "insert_rows", "layer_bytes", "load_bases",
    "load_cache", "load_corpus", "load_layers", "load_model", "merge", "methods", "parse_method", "plan_layers",
    "prefill", "prefill_layer", "prompt_twice", "refresh", "refresh_layer", "register", "rotary_taps", "save_bases",
    "save_cache", "save_layers", "serve", "spell_method", "take_rows", "with_token_layout",
]


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("lowrank-kv-jax")
    except PackageNotFoundError:  # run from a checkout that was not installed
        return "0.0.0+unknown"


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = _version()
    elif name == "methods":
        value = importlib.import_module("lowrank_kv_jax.methods")
    elif name == "serve":
        value = importlib.import_module("lowrank_kv_jax.serving")
    elif name in _MODULE_OF:
        value = getattr(importlib.import_module(f"lowrank_kv_jax.{_MODULE_OF[name]}"), name)
    else:
        raise AttributeError(f"module 'lowrank_kv_jax' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

