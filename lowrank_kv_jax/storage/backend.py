"""The platform that a program is traced for, the backend that is tried first there, and what its registers multiply."""

import functools
import os
from pathlib import Path

import jax

BACKENDS = ("xla", "triton", "mosaic_gpu", "tpu")
OVERRIDE = "LOWRANK_KV_BACKEND"
OF_PLATFORM = {"gpu": "triton", "cuda": "triton", "tpu": "tpu"}


def platform() -> str:
    """The platform that is traced for: JAX's default one, or under `jax.sharding.use_abstract_mesh` the one of its
    abstract device, which need not be there."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def on_gpu() -> bool:
    """Whether a GPU is traced for."""
    return OF_PLATFORM.get(platform()) == "triton"


def multiplies_16_bits() -> bool:
    """Whether a CPU is traced for that sums products of bfloat16 numbers in float32, twice as many at once as of float32
    ones, and nobody asked JAX for exact products (`jax_default_matmul_precision`)."""
    asked = jax.config.jax_default_matmul_precision in (None, "default", "fastest", "bfloat16")
    return platform() == "cpu" and asked and _has_bfloat16()


@functools.cache
def _has_bfloat16() -> bool:
    """By the names that Linux gives to what a processor can; False where it says nothing."""
    try:
        told = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    flags = next((line.split() for line in told.splitlines() if line.startswith("flags")), [])
    return "avx512_bf16" in flags or "amx_bf16" in flags


def asked_for(backend: str | None = None) -> str | None:
    """The backend that a caller names, `backend`, or the environment; None leaves it to the platform."""
    return backend or os.environ.get(OVERRIDE) or None


def choose(backend: str | None = None) -> str:
    """The backend to try first: the one that is `asked_for`, else that of the platform that is traced for.

    Decided while tracing, outside of the program: a compiled function holds one backend's code only.

    Raises:
        ValueError: not one of `BACKENDS`.
    """
    chosen = asked_for(backend) or OF_PLATFORM.get(platform(), "xla")
    if chosen not in BACKENDS:
        raise ValueError(f"backend={chosen!r}: allowed are {', '.join(BACKENDS)}")
    return chosen
