"""Which backend runs an op: the platform decides, a caller or LOWRANK_KV_BACKEND overrides, XLA takes the rest."""

import functools
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax

BACKENDS = ("xla", "triton", "mosaic_gpu", "tpu")
OVERRIDE = "LOWRANK_KV_BACKEND"
_OF_PLATFORM = {"gpu": "triton", "cuda": "triton", "tpu": "tpu"}


class Unsupported(Exception):
    """A kernel does not cover a case; the message says what and why."""


def platform() -> str:
    """The platform that is traced for: JAX's default one, or under `jax.sharding.use_abstract_mesh` the one of its
    abstract device, which need not be there."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def choose(backend: str | None = None) -> str:
    """The backend to try first: `backend`, else the environment's, else the one of the platform that is traced for.

    Decided while tracing, outside of the program: a compiled function holds one backend's code only.

    Raises:
        ValueError: not one of `BACKENDS`.
    """
    asked = backend or os.environ.get(OVERRIDE) or _OF_PLATFORM.get(platform(), "xla")
    if asked not in BACKENDS:
        raise ValueError(f"backend={asked!r}: allowed are {', '.join(BACKENDS)}")
    return asked


def interpreted(backend: str) -> bool:
    """Whether a kernel of `backend` must be interpreted, its hardware not being what is traced for."""
    return _OF_PLATFORM.get(platform()) != ("tpu" if backend == "tpu" else "triton")


def run(op: str, backend: str | None, kernels: Mapping[str, Callable[..., Any]], reference: Callable[[], Any]) -> Any:
    """The chosen kernel's result, or the XLA reference's where it says `Unsupported`, with one warning for a reason.

    Args:
        op: name for the warning.
        backend: as in `choose`.
        kernels: by backend; called with `interpret`.
        reference: the XLA path.
    """
    chosen = choose(backend)
    if chosen == "xla":
        return reference()
    try:
        if chosen not in kernels:
            raise Unsupported("the op has no kernel for it")
        return kernels[chosen](interpret=interpreted(chosen))
    except Unsupported as reason:
        _warn_once(op, chosen, str(reason))
        return reference()


@functools.cache
def _warn_once(op: str, backend: str, reason: str) -> None:
    warnings.warn(f"{op} runs on XLA instead of {backend}: {reason}", RuntimeWarning, stacklevel=2)
