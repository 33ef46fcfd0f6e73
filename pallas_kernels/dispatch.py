"""Which backend runs an op: the platform decides, a caller or LOWRANK_KV_BACKEND overrides, XLA takes the rest."""

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from lowrank_kv_jax.storage.backend import OF_PLATFORM, asked_for, choose, platform


class Unsupported(Exception):
    """A kernel does not cover a case; the message says what and why."""


class Slower(Unsupported):
    """The same of a case that XLA is faster at: a choice, which is said only where the kernel was asked for."""


def interpreted(backend: str) -> bool:
    """Whether a kernel of `backend` must be interpreted, its hardware not being what is traced for."""
    return OF_PLATFORM.get(platform()) != ("tpu" if backend == "tpu" else "triton")


def run(op: str, backend: str | None, kernels: Mapping[str, Callable[..., Any]], reference: Callable[[], Any]) -> Any:
    """The chosen kernel's result, or the XLA reference's where it says `Unsupported`, with one warning for each reason
    that is no choice (see `Slower`).

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
        if asked_for(backend) or not isinstance(reason, Slower):
            _warn_once(op, chosen, str(reason))
        return reference()


def without_kernels(kernels: Mapping[str, Callable[..., Any]], reason: str) -> dict[str, Callable[..., Any]]:
    """Backends' kernels that say `Unsupported`: what only XLA covers."""

    def refuse(interpret: bool) -> Any:
        raise Unsupported(reason)

    return dict.fromkeys(kernels, refuse)


def warn_anew() -> None:
    """Say every reason once more."""
    _warn_once.cache_clear()


@functools.cache
def _warn_once(op: str, backend: str, reason: str) -> None:
    warnings.warn(f"{op} runs on XLA instead of {backend}: {reason}", RuntimeWarning, stacklevel=2)
