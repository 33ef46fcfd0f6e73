"""The bases that a method reads a model's groups of layers with."""

import os
from collections.abc import Sequence
from typing import Any

from lowrank_kv_jax.checks.shown import short
from lowrank_kv_jax.method import REGISTRY, Part
from lowrank_kv_jax.methods.compose import machine_of


def bases_of_group(method: Part, spec, bases: Sequence[Any] | None) -> tuple[Any, ...]:
    """The bases of every group, checked.

    Raises:
        ValueError: the method needs calibrated bases and there are none, their number is wrong, or the method does not
            suit how the model's layers cache.
    """
    check_latents(method, spec)
    check_ropes(method, spec)
    if spec.logit_cap is not None and machine_of(method).sums_up:
        raise ValueError(f"method {method.name!r} sums up dropped tokens by their exponentials; this model caps its "
                         f"logits (logit_cap={spec.logit_cap}): use a method without moments")
    if bases is None and method.calibrated:
        raise ValueError(f"method {method.name!r} needs calibrated bases: pass bases=calibrate(model, method), or "
                         "those of a Calibrator")
    if bases is not None and (isinstance(bases, str | os.PathLike) or not isinstance(bases, Sequence)):
        raise ValueError(f"bases={short(bases)}: must be what `calibrate` or `load_bases` returns")
    return machine_of(method).group_bases(spec, bases)


def check_latents(method: Part, spec) -> None:
    """Raise ValueError where a model caches latents and `method` has no form for them."""
    if spec.latent is not None and not method.latents:
        able = sorted(name for name, cls in REGISTRY.items() if cls.latents)
        raise ValueError(f"method {method.name!r} compresses keys and values; this model caches latents (MLA): use "
                         f"one of {able}")


def check_ropes(method: Part, spec) -> None:
    """Raise ValueError where layers that `method` stores together turn their keys differently."""
    for group in method.layer_groups(spec):
        if spec.ropes is not None and len({spec.ropes[layer] for layer in group}) > 1:
            raise ValueError(f"method {method.name!r} stores layers {group[0]} to {group[-1]} together; this model's "
                             "differ in RoPE: use a method, or a group=, that keeps them apart")
