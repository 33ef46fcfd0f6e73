"""FLOPs and bytes of a decoded token, counted without running anything, and what a device's roof makes of them.

Bytes are those of the leaves: a decode step reads the weights and the cache once. FLOPs are counted in the traced
program of `decode_step`, operation by operation, so that every method is covered, rebuilding of keys and folding of
bases included (Online Subspace Projection, section 9).
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.attention.spec import AttentionSpec
from lowrank_kv_jax.estimators.moments import Across, Fisher, KeysByValues, Moments, Sensitivity
from lowrank_kv_jax.estimators.rank_for_output import THRESHOLDS, OutputErrors
from lowrank_kv_jax.generation.forward import decode_step, make_layout
from lowrank_kv_jax.method import Part
from lowrank_kv_jax.method.accounting import cache_bytes
from lowrank_kv_jax.models.config import ModelConfig
from lowrank_kv_jax.models.decoder import init_params
from lowrank_kv_jax.saving.saved_cache import abstract_cache


class Roof(NamedTuple):
    """A device: bytes/s of its memory and dense 16-bit FLOP/s, both nominal."""

    bandwidth: float
    flops: float


ROOFS = {
    "a100": Roof(2.0e12, 312e12),
    "h100": Roof(3.35e12, 989e12),
    "h200": Roof(4.8e12, 989e12),
    "tpu-v5e": Roof(0.82e12, 197e12),
}


HAIR = 1e-2
"""By how much the largest variance of white activations exceeds the least."""


class Cost(NamedTuple):
    """Of one decode step of a batch.

    Attributes:
        flops: in all; products count two.
        attention_flops: without those of the weights' products.
        weight_bytes: read once a step.
        cache_bytes: read once a step, by kind (`state.KINDS`).
        tokens: in the cache of each row.
        batch: rows.
    """

    flops: float
    attention_flops: float
    weight_bytes: int
    cache_bytes: dict[str, int]
    tokens: int
    batch: int

    @property
    def bytes(self) -> int:
        return self.weight_bytes + sum(self.cache_bytes.values())

    def seconds(self, roof: Roof) -> float:
        """The least time of a step."""
        return max(self.bytes / roof.bandwidth, self.flops / roof.flops)

    def bound(self, roof: Roof) -> str:
        """What the step waits for: "bandwidth" or "compute"."""
        return "bandwidth" if self.bytes / roof.bandwidth >= self.flops / roof.flops else "compute"


def decode_cost(
    config: ModelConfig, method: Part, tokens: int, batch: int = 1, dtype: Any = None,
    weight_dtype: Any = "bfloat16",
) -> Cost:
    """The cost of decoding one token for each row of a cache that is full.

    Args:
        config: the model; weights are not needed.
        method: any; bases that it calibrates are counted as they would be stored.
        tokens: the capacity, which prompt and new tokens have filled up.
        batch: rows.
        dtype: of the cache, by default the library's.
        weight_dtype: of the weights.

    Raises:
        ValueError: as `make_layout`, and methods that do not suit the model.
    """
    method.validate(config.attention)
    block = method.default_block
    layout = make_layout(config, batch, max(1, tokens - block), tokens, block, dtype)
    bases = white_bases(config.attention, method, layout.dtype)
    cache = abstract_cache(method, layout, bases)
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    token = jax.ShapeDtypeStruct((batch,), jnp.int32)
    step = functools.partial(decode_step, method, config)
    program = jax.make_jaxpr(lambda p, c, t, b: step(p, c, t, bases=b))(params, cache, token, bases)
    weights = _sizes(params)
    # the embedding is looked up, not multiplied; a tied one is the output head all the same
    looked_up = 0 if config.tie_embeddings else config.vocab_size * config.hidden_size
    experts, moe = sum(_sizes(layer["mlp"].get("experts", {})) for layer in params["layers"]), config.moe
    rest = weights - looked_up - experts
    used, read = (0, 0) if moe is None else (moe.per_token / moe.count, min(1, batch * moe.per_token / moe.count))
    products = 2.0 * batch * (rest + used * experts)
    flops = count_flops(program.jaxpr)
    return Cost(
        flops, flops - products, int(rest + read * experts) * jnp.dtype(weight_dtype).itemsize,
        cache_bytes(cache, bases).by_kind, tokens, batch,
    )


def white_bases(spec: AttentionSpec, method: Part, dtype: Any) -> Any:
    """Bases of the shapes that calibration gives; ranks by energy and bits by variance are those of white activations."""
    if not method.calibrated:
        return method.default_bases(spec)
    groups = method.layer_groups(spec)
    alone = all(len(group) == 1 for group in groups) and "fisher" not in method.reads
    fitted_to = dataclasses.replace(spec, num_layers=1, windows=spec.windows[:1]) if alone else spec
    layers, kv, dim, groups = fitted_to.num_layers, spec.kv_heads, spec.head_dim, method.layer_groups(fitted_to)

    def eye(*shape):  # no two components alike: which of them have more bits is then decided by a hair
        nearly = np.diag(np.linspace(1 + HAIR, 1, shape[-1])).astype(np.float32)
        return np.broadcast_to(nearly, (*shape, shape[-1]))

    wide, heads = eye(layers, kv * dim), eye(layers, kv, dim)
    votes, ones = np.broadcast_to(np.linspace(1, 0, 16), (layers, 16)), np.ones((layers, kv, dim))
    across = {group: Across(*3 * [eye(len(group) * kv * dim)]) for group in groups if len(group) > 1}
    by_values = {group: KeysByValues(*2 * [0 * eye(len(group) * kv * dim)]) for group in groups}
    moments = Moments(1, wide, wide, wide, heads, heads, fisher=Fisher(wide, wide, 1, np.ones((layers, 2))), votes=votes,
                      sensitivity=Sensitivity(ones, ones, ones), across=across, keys_by_values=by_values,
                      outputs=OutputErrors(np.zeros((layers, len(THRESHOLDS)))))
    fitted = method.fit(fitted_to, moments._replace(sampled=moments))
    fitted = fitted * spec.num_layers if alone else fitted  # all layers are alike
    return jax.tree.map(lambda x: jnp.asarray(x, dtype if jnp.issubdtype(x.dtype, jnp.floating) else None), fitted)


def _sizes(tree: Any) -> int:
    return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))


# ---- counting ---------------------------------------------------------------------------------------------------

_FREE = {
    "reshape", "broadcast_in_dim", "transpose", "squeeze", "slice", "dynamic_slice", "dynamic_update_slice", "gather",
    "scatter", "concatenate", "pad", "iota", "convert_element_type", "bitcast_convert_type", "copy", "copy_p",
    "expand_dims", "rev", "stop_gradient", "split", "optimization_barrier", "select_n", "eq", "ne", "lt", "le", "gt",
    "ge", "and", "or", "not", "argmax", "sort", "clamp", "sign", "is_finite",
}  # moves and comparisons


def count_flops(jaxpr: Any) -> float:
    """FLOPs of a traced program: two for each product of a contraction, one for each element of other arithmetic.

    A loop over the blocks of a buffer whose trip count depends on the length counts as many blocks as the buffer has.
    """
    return sum(_flops(eqn) for eqn in jaxpr.eqns)


def _flops(eqn: Any) -> float:
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        (contract, _), _ = params["dimension_numbers"]
        depth = math.prod(eqn.invars[0].aval.shape[axis] for axis in contract)
        return 2.0 * depth * math.prod(eqn.outvars[0].aval.shape)
    if name == "while":
        return _blocks(eqn) * count_flops(params["body_jaxpr"].jaxpr)
    if name == "scan":
        return params["length"] * count_flops(params["jaxpr"].jaxpr)
    if name == "cond":
        return max(count_flops(branch.jaxpr) for branch in params["branches"])
    if inner := _called(eqn):
        return sum(count_flops(part) for part in inner)
    if name in _FREE or name.startswith("random_"):
        return 0.0
    largest = eqn.invars if name.startswith(("reduce", "cum")) else eqn.outvars
    return float(max((math.prod(v.aval.shape) for v in largest if hasattr(v.aval, "shape")), default=0))


def _blocks(eqn: Any) -> int:
    """Blocks that a loop goes over: how many times the largest slice of its body fits into what it is a slice of."""
    slices = [
        (math.prod(each.invars[0].aval.shape), math.prod(each.outvars[0].aval.shape))
        for each in _equations(eqn.params["body_jaxpr"].jaxpr)
        if each.primitive.name == "dynamic_slice"
    ]
    whole, part = max(slices, default=(1, 1))
    return max(1, -(-whole // part))


def _equations(jaxpr: Any) -> Iterator[Any]:
    """Those of a program and of the programs that it calls."""
    for eqn in jaxpr.eqns:
        yield eqn
        for part in _called(eqn):
            yield from _equations(part)


def _called(eqn: Any) -> list[Any]:
    """Programs that an equation calls."""
    inner = (getattr(value, "jaxpr", value) for value in eqn.params.values())
    return [part for part in inner if hasattr(part, "eqns")]
