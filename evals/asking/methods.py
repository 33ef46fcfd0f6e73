"""Methods by spec, and the bases of those that are calibrated from one run of the model over a corpus."""

from collections.abc import Mapping, Sequence
from typing import Any

from lowrank_kv_jax.calibration.calibrate import fit_bases, moments_for, serve
from lowrank_kv_jax.calibration.corpus import Corpus, token_windows
from lowrank_kv_jax.checks.models import weights_dtype
from lowrank_kv_jax.estimators.host_eigh import remembering
from lowrank_kv_jax.estimators.moments import Moments
from lowrank_kv_jax.method import Part
from lowrank_kv_jax.method.layout import DEFAULT_BLOCK
from lowrank_kv_jax.methods import REGISTRY
from lowrank_kv_jax.methods.parse import parse_method, spell_method
from lowrank_kv_jax.saving.kept_bases import KeptBases
from lowrank_kv_jax.storage.cache_dtype import default_cache_dtype

SHORTLIST = (
    "full", "streamingllm:keep=0.25", "static-pca-h:rank=0.6", "ojakv:rank=0.6",
    "single-svd:rank=0.25", "transform:smaller=8,rope=tile,sampled=False",
)
LENGTH, WINDOWS = 2048, 4
_LAST: dict[Any, Moments] = {}
"""The moments that were collected last, by what decides them."""


def parse_methods(specs: Sequence[str] | None) -> dict[str, Part]:
    """Methods by spec, in the order given; None is the shortlist, `all` every registered method with its
    defaults.

    Raises:
        ValueError: an unknown or malformed spec (see `parse_method`), or a method that is given twice, spelled alike or
            not.
    """
    specs = list(SHORTLIST if specs is None else specs)
    specs = ["full", *sorted(set(REGISTRY) - {"full"})] if specs == ["all"] else specs
    if len(set(specs)) < len(specs):
        raise ValueError(f"methods {specs}: each may be given once")
    methods, spelled = {spec: parse_method(spec) for spec in specs}, {}
    for spec, method in methods.items():
        other = spelled.setdefault(spell_method(method), spec)
        if other != spec:
            raise ValueError(f"methods {other!r} and {spec!r}: are one method, give it once")
    return methods


def check_methods(model: Any, methods: Mapping[str, Part], command: str) -> None:
    """Raise ValueError for a model without a tokenizer, and for methods that do not suit it, by their specs."""
    if model.tokenizer is None:
        raise ValueError(f"model {model.name!r} has no tokenizer: {command} needs one")
    for spec, method in methods.items():
        try:
            method.validate(model.config.attention)
        except ValueError as error:
            raise ValueError(f"{spec}: {error}") from error


def bases_of(
    model: Any, methods: Mapping[str, Part], corpus: Corpus, *, length: int = LENGTH, windows: int = WINDOWS,
    seed: int = 0, dtype: Any = None, progress: bool = False,
) -> dict[str, Any]:
    """The bases of those methods that are calibrated; without running the model, where none is or all are kept.

    Args:
        length, windows, seed: see `token_windows`; no window is longer than the model's context.
        dtype: of the bases, by default that of caches.
    """
    dtype = default_cache_dtype() if dtype is None else dtype
    length = min(length, model.config.context)
    kept = KeptBases(model, corpus, {"length": length, "windows": windows, "seed": seed}, dtype)
    calibrated = {spec: method for spec, method in methods.items() if method.calibrated}
    bases: dict[str, Any] = {spec: kept.find(method) for spec, method in calibrated.items()}
    missing = {spec: method for spec, method in calibrated.items() if bases[spec] is None}
    if not missing:
        return bases
    moments = moments_of(model, missing, corpus, length=length, windows=windows, seed=seed, progress=progress)
    with remembering():
        for spec, method in missing.items():
            bases[spec] = fit_bases(model, method, moments, dtype)
            kept.keep(method, bases[spec])
    return bases


def moments_of(
    model: Any, methods: Mapping[str, Part], corpus: Corpus, *, length: int = LENGTH, windows: int = WINDOWS,
    seed: int = 0, progress: bool = False,
) -> Moments:
    """What the fits of these methods read; an evaluation asks again and again, for the same text."""
    length = min(length, model.config.context)
    tokens = token_windows(model.tokenizer, corpus.texts, length, windows, seed, corpus=corpus.name)
    key = model.fingerprint, weights_dtype(model), corpus.sha256, tokens.shape, seed
    moments = _LAST.get(key)
    if moments is None or not all(serve(moments, method, model.config.attention) for method in methods.values()):
        moments = moments_for(model, list(methods.values()), tokens, progress, seed=seed)
        _LAST.clear()
        _LAST[key] = moments
    return moments


def calibration_settings(corpus: Corpus, methods: Mapping[str, Part]) -> dict[str, Any]:
    """What records keep of the calibration; null where no method needs one."""
    calibrated = any(method.calibrated for method in methods.values())
    return {"calibration": {"corpus": corpus.name, "sha256": corpus.sha256} if calibrated else None}


def conditions_of(settings: Mapping[str, Any], method: Part | None) -> dict[str, Any]:
    """A run's settings as the records of one method keep them: without a calibration that it does not read, with the
    block that it has of its own.

    So a method's records stay the same whatever other methods shared its run.
    """
    settings = {**settings, "own_block": None if method is None else own_block(method, settings.get("block"))}
    if method is not None and method.calibrated or "calibration" not in settings:
        return settings
    return {**settings, "calibration": None}


def own_block(method: Part, block: int | None = None) -> int | None:
    """What records keep of the block that a method asks for, where a run names none; null where it is `DEFAULT_BLOCK`."""
    return None if block is not None or method.default_block == DEFAULT_BLOCK else method.default_block
