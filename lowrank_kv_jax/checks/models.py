"""What is given for a model."""

from typing import Any

import jax

from lowrank_kv_jax.checks.shown import short


def check_model(model: Any, *needed: str) -> None:
    """Raise ValueError where a model lacks what is needed of it; where nothing is named, what running it takes."""
    missing = [name for name in needed or ("config", "params", "tokenizer") if not hasattr(model, name)]
    if missing:
        raise ValueError(f"model={short(model)}: has no {', '.join(missing)}; must be what `load_model` returned, or an "
                         "object with these")


def weights_dtype(model: Any) -> str | None:
    """The dtype of its largest array, by name: its fingerprint says nothing of it. None where `params` holds none."""
    arrays = [x for x in jax.tree.leaves(getattr(model, "params", None)) if hasattr(x, "dtype")]
    return max(arrays, key=lambda x: x.size).dtype.name if arrays else None
