"""What the fields of Online Subspace Projection may be."""

import math
from typing import Any

from lowrank_kv_jax.estimators import make_estimator
from lowrank_kv_jax.storage.quantised import BASIS_STORAGE


def check_osp_fields(codec: Any) -> None:
    """Raise ValueError where a field of an `OnlineSubspaceProjection` has a value that is not allowed, alone or beside
    another's."""
    for field, least in (("chunk_length", 1), ("min_chunk", 1), ("chunks", 1), ("window", 1), ("lookahead", 0),
                         ("subsample", 1)):
        value = getattr(codec, field)
        optional = field in ("min_chunk", "chunks", "window")
        if not (value is None and optional) and (type(value) is not int or value < least):
            raise ValueError(f"{field}={value!r}: must be an int of at least {least}")
    if codec.chunk_length % codec.page:
        raise ValueError(f"chunk_length={codec.chunk_length}: must be a multiple of min_chunk={codec.page}")
    for field in ("prior", "unseen"):
        value = getattr(codec, field)
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{field}={value!r}: must be a finite number of at least 0")
    if not codec.sketch >= 1:
        raise ValueError(f"sketch={codec.sketch!r}: must be at least 1, in rows (int) or times the rank (float)")
    for field in ("tau_k", "tau_v", "reuse"):
        value = getattr(codec, field)
        if value is not None and not 0 <= value <= 1:
            raise ValueError(f"{field}={value!r}: must lie in [0, 1]")
    if codec.basis_dtype not in (None, *BASIS_STORAGE):
        raise ValueError(f"basis_dtype={codec.basis_dtype!r}: allowed are None, {', '.join(BASIS_STORAGE)}")
    if codec.when_full not in ("merge", "keep"):
        raise ValueError(f"when_full={codec.when_full!r}: allowed are merge, keep")
    for field, only in (("order", "reduced"), ("recent_of", "ring"), ("decoded", "coded")):
        if getattr(codec, field) != only:
            raise ValueError(f"{field}={getattr(codec, field)!r}: {codec.name} has {field}={only!r} only")
    if codec.rotary and codec.rope != "pre":
        raise ValueError(f"rotary=True, rope={codec.rope!r}: bases that rotate are of keys before RoPE, rope='pre'")
    estimator = make_estimator(codec.estimator)
    if codec.head_ranks == "own" and (codec.rotary or not estimator.keeps_energies):
        raise ValueError(f"head_ranks='own', rotary={codec.rotary}, estimator={codec.estimator!r}: own ranks need "
                         "rotary=False and an estimator that keeps energies (covariance, frequent_directions, svd)")
