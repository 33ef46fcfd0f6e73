"""Continuous batching over the pure functions: `lkv.serve`."""

from lowrank_kv_jax.serving.engine import Engine as Engine
from lowrank_kv_jax.serving.requests import Answer as Answer
from lowrank_kv_jax.serving.requests import Request as Request
