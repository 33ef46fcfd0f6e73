"""A decoded step through a cache by XLA, and by Triton kernels that are interpreted."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from helpers import PLAIN, bases_for, model, prompts

from lowrank_kv_jax.generation.forward import extend, prefill
from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.storage.backend import OVERRIDE


def steps_by_backend(spec: str, monkeypatch: Any, op: tuple[Any, str], counts: Any = None) -> tuple[dict[str, Any], int]:
    """Of one layer and two ragged rows: states before and after and logits, by backend; and how often an op was traced.

    Args:
        op: module and name of the kernel.
        counts: tokens of each row.
    """
    shallow, method = dataclasses.replace(PLAIN, num_layers=1, windows=(None,)), parse_method(spec)
    params, bases, lengths = model(shallow).params, bases_for(method, shallow), jnp.array([48, 31])
    found, called, original = {}, [], getattr(*op)
    monkeypatch.setattr(*op, lambda *given, **told: called.append(1) or original(*given, **told))
    for backend in ("xla", "triton"):
        # the backend is chosen while tracing: a model that differs in nothing else has programs of its own
        config = dataclasses.replace(shallow, context=shallow.context - (backend == "triton"))
        monkeypatch.setenv(OVERRIDE, backend)
        cache, _ = prefill(method, config, params, prompts()[:2, :48], lengths, bases=bases, capacity=80, block=8,
                           dtype=jnp.float32)
        before = jax.tree.map(jnp.copy, cache.groups)
        cache, logits = extend(method, config, params, cache, jnp.array([[5], [6]]), counts, bases=bases)
        found[backend] = before, cache.groups, logits
    return found, len(called)
