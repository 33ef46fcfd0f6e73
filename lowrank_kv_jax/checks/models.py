"""What is given for a model."""

from typing import Any

from lowrank_kv_jax.checks.shown import short


def check_model(model: Any, *needed: str) -> None:
    """Raise ValueError where a model lacks what is needed of it; where nothing is named, what running it takes."""
    missing = [name for name in needed or ("config", "params", "tokenizer") if not hasattr(model, name)]
    if missing:
        raise ValueError(f"model={short(model)}: has no {', '.join(missing)}; must be what `load_model` returned, or an "
                         "object with these")
