"""The bases that a method reads a model's groups of layers with."""

from collections.abc import Sequence
from typing import Any

from lowrank_kv_jax.method import REGISTRY, Part
from lowrank_kv_jax.methods.compose import machine_of


def bases_of_group(method: Part, spec, bases: Sequence[Any] | None) -> tuple[Any, ...]:
    """The bases of every group, checked.

    Raises:
        ValueError: the method needs calibrated bases and there are none, or their number is wrong.
    """
    check_latents(method, spec)
    if bases is None and method.calibrated:
        raise ValueError(f"method {method.name!r} needs calibrated bases: pass bases=calibrate(model, method), or "
                         "those of a Calibrator")
    return machine_of(method).group_bases(spec, bases)


def check_latents(method: Part, spec) -> None:
    """Raise ValueError where a model caches latents and `method` has no form for them."""
    if spec.latent is not None and not method.latents:
        able = sorted(name for name, cls in REGISTRY.items() if cls.latents)
        raise ValueError(f"method {method.name!r} compresses keys and values; this model caches latents (MLA): use "
                         f"one of {able}")
