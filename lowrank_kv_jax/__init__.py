"""Compressed KV caches as a pure-functional JAX library.

Everything named here is imported when it is first used, so that `import lowrank_kv_jax` itself costs nothing.
"""

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowrank_kv_jax import methods
    from lowrank_kv_jax.accounting import CacheBytes, cache_bytes, full_cache_bytes
    from lowrank_kv_jax.cache import Cache, fork, insert_rows, take_rows
    from lowrank_kv_jax.calibrate import calibrate, collect_moments
    from lowrank_kv_jax.corpus import load_corpus
    from lowrank_kv_jax.forward import decode_step, extend, prefill, refresh
    from lowrank_kv_jax.generate import Generation, decode_block, generate, ingest
    from lowrank_kv_jax.method import KVMethod, Layout, Part, Place, register
    from lowrank_kv_jax.models.load import LoadedModel, load_model
    from lowrank_kv_jax.parse import parse_method, spell_method
    from lowrank_kv_jax.partial import AttnPartial, merge
    from lowrank_kv_jax.sampling import Sampler
    from lowrank_kv_jax.saved_bases import load_bases, save_bases
    from lowrank_kv_jax.saved_cache import load_cache, save_cache
    from lowrank_kv_jax.spec import AttentionSpec, Taps
    from lowrank_kv_jax.token_layout import with_token_layout

_HOME = {
    "accounting": ("CacheBytes", "cache_bytes", "full_cache_bytes"),
    "cache": ("Cache", "fork", "insert_rows", "take_rows"),
    "calibrate": ("calibrate", "collect_moments"),
    "corpus": ("load_corpus",),
    "forward": ("decode_step", "extend", "prefill", "refresh"),
    "generate": ("Generation", "decode_block", "generate", "ingest"),
    "method": ("KVMethod", "Layout", "Part", "Place", "register"),
    "models.load": ("LoadedModel", "load_model"),
    "parse": ("parse_method", "spell_method"),
    "partial": ("AttnPartial", "merge"),
    "sampling": ("Sampler",),
    "saved_bases": ("load_bases", "save_bases"),
    "saved_cache": ("load_cache", "save_cache"),
    "spec": ("AttentionSpec", "Taps"),
    "token_layout": ("with_token_layout",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "AttentionSpec", "AttnPartial", "Cache", "CacheBytes", "Generation", "KVMethod", "Layout",
    "LoadedModel", "Part", "Place", "Sampler", "Taps", "__version__", "cache_bytes", "calibrate",
    "collect_moments", "decode_block", "decode_step", "extend", "fork", "full_cache_bytes", "generate",
    "ingest", "insert_rows", "load_bases", "load_cache", "load_corpus", "load_model", "merge", "methods",
    "parse_method", "prefill", "refresh", "register", "save_bases", "save_cache", "spell_method",
    "take_rows", "with_token_layout",
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
    elif name in _MODULE_OF:
        value = getattr(importlib.import_module(f"lowrank_kv_jax.{_MODULE_OF[name]}"), name)
    else:
        raise AttributeError(f"module 'lowrank_kv_jax' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


class _Package(types.ModuleType):
    """`generate` and `calibrate` name a function here and the module it lives in: importing the module, which
    sets an attribute of the package, must not put the module in the function's place."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _MODULE_OF and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
