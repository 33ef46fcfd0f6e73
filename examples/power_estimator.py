"""An estimator of your own: docs/extending.md, "An estimator"."""

import dataclasses

import jax
import jax.numpy as jnp

import lowrank_kv_jax as lkv
from lowrank_kv_jax.estimators.estimator import SizedEstimator, batch_moment, check_batch, register_estimator
from lowrank_kv_jax.estimators.linalg import orthonormalise
from lowrank_kv_jax.storage.state import leaf, state


@state
class Columns:
    """float32 `[*lead, W, R]`; its bytes count as moments."""

    columns: jax.Array = leaf("batch", "kv_heads", "width", "rank", kind="moments")


@register_estimator("power")
@dataclasses.dataclass(frozen=True)
class PowerIteration(SizedEstimator):
    """One step of orthogonal iteration for each batch."""

    def init(self, lead, width, start=None):
        eye = jnp.broadcast_to(jnp.eye(width), (*lead, width, width))
        start = eye if start is None else jnp.concatenate([start.astype(jnp.float32), eye], axis=-1)
        return Columns(orthonormalise(start[..., : min(self.size, width)]))

    def update(self, learned, x, weight=None):
        x, weight = check_batch(x, weight)
        moment = batch_moment(x, weight) / jnp.maximum(weight.sum(-1), 1)[..., None, None]
        return Columns(orthonormalise(learned.columns + moment @ learned.columns))

    def basis(self, learned, rank):
        self.check_rank(rank, learned.columns.shape[-2])
        return learned.columns[..., :rank]


if __name__ == "__main__":
    model = lkv.load_model("smollm2-135m")
    method = lkv.parse_method("ojakv:rank=0.5,estimator=power")
    bases = lkv.calibrate(model, method)
    out = lkv.generate(model, method, ["The KV cache is a list of keys and values. " * 6], bases=bases, max_new_tokens=16)
    print(out.texts[0], lkv.cache_bytes(out.cache, bases).smaller)
