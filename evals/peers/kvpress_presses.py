"""kvpress' presses by spec, e.g. `snapkv:4x`."""

import importlib.util
from collections.abc import Callable
from typing import Any

PREFIX = "kvpress/"
"""What the methods of these records are called: PREFIX and the spec."""

PRESSES = ("snapkv", "adakv", "kvzip", "expected-attention", "streamingllm")
MASKED = frozenset({"adakv", "kvzip"})
"""Presses that choose a budget for each head: kvpress masks what they drop and keeps every byte of it."""


def require_kvpress() -> None:
    """Raise ValueError, with the remedy, unless kvpress can be imported."""
    missing = [name for name in ("torch", "kvpress") if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"the kvpress peer needs {' and '.join(missing)}: in an environment of its own, since kvpress "
                         "asks for an older transformers, `pip install lowrank-kv-jax[kvpress]` (torch: the CPU build)")


def parse_press(spec: str) -> tuple[str, float]:
    """Name and nominal ratio of a spec; `full` is 1.

    Raises:
        ValueError: an unknown press, or a ratio that is not `Nx` with N of at least 1.
    """
    name, _, ratio = spec.partition(":")
    if spec == "full":
        return "full", 1.0
    if name not in PRESSES:
        raise ValueError(f"unknown kvpress method {name!r}: must be full or of {', '.join(PRESSES)}, e.g. snapkv:4x")
    try:
        value = float(ratio.removesuffix("x")) if ratio.endswith("x") else 0.0
    except ValueError:
        value = 0.0
    if not 1 <= value < 1000:
        raise ValueError(f"{spec!r}: the ratio must be spelled like 4x, and be at least 1x")
    return name, value


def make_press(spec: str) -> Any:
    """The press of a spec with kvpress' defaults; None for `full`."""
    import kvpress

    name, ratio = parse_press(spec)
    removed = 1 - 1 / ratio
    makers: dict[str, Callable[[], Any]] = {
        "full": lambda: None,
        "snapkv": lambda: kvpress.SnapKVPress(removed),
        "adakv": lambda: kvpress.AdaKVPress(kvpress.SnapKVPress(removed)),
        "kvzip": lambda: kvpress.KVzipPress(removed),
        "expected-attention": lambda: kvpress.ExpectedAttentionPress(removed),
        "streamingllm": lambda: kvpress.StreamingLLMPress(removed),
    }
    return makers[name]()
