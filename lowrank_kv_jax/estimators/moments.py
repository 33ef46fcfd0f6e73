"""Second moments of a model's activations: all that calibration keeps of a corpus."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from lowrank_kv_jax.attention.rope import rope_angles, rotate
from lowrank_kv_jax.attention.spec import AttentionSpec, Taps
from lowrank_kv_jax.estimators.rank_for_output import OutputErrors
from lowrank_kv_jax.storage import precise
from lowrank_kv_jax.storage.sharding import to_host

SIDES = ("k", "k_pre", "v")


class Fisher(NamedTuple):
    """Empirical Fisher information: means over sequences of G^T G, where G `[H, W]` is the gradient of a sequence's
    mean negative log-likelihood by W_k or W_v.

    Attributes:
        k, v: float64 `[L, W, W]`. Their traces are the information of a whole matrix, the sum of squared gradients.
        samples: sequences.
        roots: of each matrix, keys first, float64 `[L, 2]`: the mean over its entries of the root of their mean squared
            gradient, which is what Palu's code goes by; None where only G^T G is known.
    """

    k: np.ndarray
    v: np.ndarray
    samples: int
    roots: np.ndarray | None = None

    @property
    def information(self) -> np.ndarray:
        """Of each matrix, `[L, 2]`, keys first."""
        return np.stack([np.trace(x, axis1=-2, axis2=-1) for x in (self.k, self.v)], axis=-1)


class Sensitivity(NamedTuple):
    """Mean squares of the loss' gradient by channels of keys before and after RoPE and of values, float64 `[L, K, D]`;
    see `calibration.sensitivity`."""

    k_pre: np.ndarray
    k: np.ndarray
    v: np.ndarray


class Across(NamedTuple):
    """Sums of outer products of the tokens of G layers side by side, `[G * W, G * W]`, layer by layer.

    Attributes:
        k, k_pre, v: keys after and before RoPE, values.
    """

    k: np.ndarray
    k_pre: np.ndarray
    v: np.ndarray


class KeysByValues(NamedTuple):
    """Sums of outer products of keys and values of the same tokens, G layers side by side, `[G * W, G * W]`.

    Attributes:
        k, k_pre: keys after and before RoPE, in rows, by values, in columns.
    """

    k: np.ndarray
    k_pre: np.ndarray


class Moments(NamedTuple):
    """Sums of outer products over a corpus, per layer; W = K * D, the heads of a layer side by side. They are None where
    no method reads them.

    Attributes:
        tokens: number of tokens summed.
        k, k_pre, v: `[L, W, W]`, keys after and before RoPE, values.
        q, q_pre: `[L, K, D, D]`, all query heads of a kv head together.
        k_sum, k_pre_sum, v_sum: `[L, W]`, sums of the tokens themselves; None stands for 0.
        fisher: of the projections, where a method reads it.
        votes: of a second reading, where a method reads them; see `calibration.layer_votes.collect_votes`.
        sensitivity: of the loss to keys and values, where a method reads it.
        across: of groups of layers, where a method reads them.
        keys_by_values: of groups of layers, of one layer too, where a method reads them.
        outputs: errors of the layers' outputs, where a method reads them; see `calibration.output_errors`.
        sampled: of text that the model wrote itself, where a method reads it; see `calibration.sampled`.
    """

    tokens: np.ndarray | int
    k: np.ndarray
    k_pre: np.ndarray
    v: np.ndarray
    q: np.ndarray
    q_pre: np.ndarray
    k_sum: np.ndarray | None = None
    k_pre_sum: np.ndarray | None = None
    v_sum: np.ndarray | None = None
    fisher: Fisher | None = None
    votes: np.ndarray | None = None
    sensitivity: Sensitivity | None = None
    across: Mapping[tuple[int, ...], Across] | None = None
    keys_by_values: Mapping[tuple[int, ...], KeysByValues] | None = None
    sampled: "Moments | None" = None
    outputs: OutputErrors | None = None

    @property
    def held(self) -> frozenset[str]:
        """What of `KVMethod.reads` is here."""
        there = {"moments": self.k, "fisher": self.fisher, "votes": self.votes, "sensitivity": self.sensitivity,
                 "across": self.across, "keys_by_values": self.keys_by_values, "sampled": self.sampled,
                 "outputs": self.outputs}
        return frozenset(name for name, found in there.items() if found is not None)

    def with_sampled(self) -> "Moments":
        """Keys and values of the corpus and of what the model wrote, together; queries stay those of the corpus.

        Raises:
            ValueError: the model wrote nothing.
        """
        if self.sampled is None:
            raise ValueError("these moments hold no text that the model wrote: calibrate with `calibrate`, or give "
                             "sampled=False")
        own, sums = self.sampled, {}
        for name in ("tokens", "k", "k_pre", "v", "k_sum", "k_pre_sum", "v_sum"):
            mine, more = getattr(self, name), getattr(own, name)
            sums[name] = None if mine is None else mine + more
        for name in ("across", "keys_by_values"):
            groups, others = getattr(self, name), getattr(own, name) or {}
            if groups is not None:
                sums[name] = {group: type(mine)(*map(np.add, mine, others[group]))
                              for group, mine in groups.items() if group in others}
        return self._replace(**sums)

    def mean(self, name: str) -> np.ndarray:
        """Mean token `[L, W]` of `k`, `k_pre` or `v`."""
        total = getattr(self, f"{name}_sum")
        return np.zeros(getattr(self, name).shape[:2]) if total is None else np.asarray(total) / self.tokens

    def between(self, name: str, layers: tuple[int, ...]) -> np.ndarray:
        """Sums `[G * W, G * W]` of `k`, `k_pre` or `v` of G layers side by side.

        Raises:
            ValueError: the calibration did not take these layers together.
        """
        if len(layers) == 1:
            return getattr(self, name)[layers[0]]
        if self.across is None or layers not in self.across:
            raise ValueError(f"these moments hold no products of layers {layers[0]} to {layers[-1]}: calibrate with "
                             "`calibrate` for this group, or give group=1")
        return getattr(self.across[layers], name)

    def by_values(self, name: str, layers: tuple[int, ...]) -> np.ndarray:
        """Sums `[G * W, G * W]` of `k` or `k_pre`, in rows, by the values of G layers side by side.

        Raises:
            ValueError: the calibration did not take keys and values of these layers together.
        """
        if self.keys_by_values is None or layers not in self.keys_by_values:
            raise ValueError(f"these moments hold no products of keys and values of layers {layers[0]} to {layers[-1]}: "
                             "calibrate with `calibrate` for this method, or give kv=apart")
        return getattr(self.keys_by_values[layers], name)

    def per_head(self, name: str, kv_heads: int) -> np.ndarray:
        """Diagonal blocks `[L, K, D, D]` of `k`, `k_pre` or `v`; `q` and `q_pre` as they are."""
        full = getattr(self, name)
        if full.ndim == 4:
            return full
        return head_blocks(full, kv_heads)


def head_blocks(matrices: Float[np.ndarray, "L W W"], heads: int) -> Float[np.ndarray, "L {heads} D D"]:
    """Diagonal blocks `[L, heads, D, D]` of `[L, W, W]`, W = heads * D, for heads or groups of heads side by side."""
    count, width, _ = matrices.shape
    blocks = matrices.reshape(count, heads, width // heads, heads, width // heads)
    return np.moveaxis(np.diagonal(blocks, axis1=1, axis2=3), -1, 1)


class Products(NamedTuple):
    """Sums of x y^T over tokens, float32, around a shift of each factor: products of means a hundred times the deviations
    would leave float32 no digit for these.

    Attributes:
        rest: sum of (x - a)(y - b)^T, `[W, V]`.
        a, b: the shifts, means as float32 tells them, `[W]`, `[V]`.
        rest_a, rest_b: sums of x - a and of y - b.
        tokens: float32.
    """

    rest: jax.Array
    a: jax.Array
    b: jax.Array
    rest_a: jax.Array
    rest_b: jax.Array
    tokens: jax.Array

    def whole(self) -> tuple[np.ndarray, np.ndarray]:
        """Sums of x y^T `[W, V]` and of x `[W]`, float64 on the host."""
        rest, a, b, rest_a, rest_b, tokens = (to_host(x).astype(np.float64) for x in self)
        sums = tokens * a + rest_a
        return rest + np.outer(a, rest_b) + np.outer(sums, b), sums


def layer_moments(
    spec: AttentionSpec, taps: Taps, positions: Int[jax.Array, "B T"], valid: Bool[jax.Array, "B T"]
) -> dict[str, Any]:
    """Outer products of the tokens of one layer over the valid ones: `Products` of keys and values, float32
    `[K, D, D]` of queries.

    Args:
        taps: of T tokens, `[B, T, ...]`.
        positions: int32 `[B, T]`.
        valid: bool `[B, T]`.
    """
    q_pre = taps.q
    if spec.rope is not None:
        cos, sin = rope_angles(spec.rope, positions[:, :, None])
        q_pre = rotate(taps.q, cos, -sin)

    def queries(q):
        q = jnp.where(valid[:, :, None, None], q, 0).astype(jnp.float32)
        q = q.reshape(*q.shape[:2], spec.kv_heads, spec.group_size, spec.head_dim)
        q = q.transpose(2, 0, 1, 3, 4).reshape(spec.kv_heads, -1, spec.head_dim)
        return precise.matmul(q.swapaxes(1, 2), q)

    def joint(name):
        own = _shifted([taps], name, valid)
        return _products(own, own, valid)

    return {**{name: joint(name) for name in SIDES}, "q": queries(taps.q), "q_pre": queries(q_pre)}


def moments_across(taps: Sequence[Taps], valid: Bool[jax.Array, "B T"]) -> dict[str, Products]:
    """`Across` of layers over the valid tokens of their taps `[B, T, ...]`; valid bool `[B, T]`."""
    found = ((name, _shifted(taps, name, valid)) for name in Across._fields)
    return {name: _products(x, x, valid) for name, x in found}


def moments_by_values(taps: Sequence[Taps], valid: Bool[jax.Array, "B T"]) -> dict[str, Products]:
    """`KeysByValues` of layers, otherwise as `moments_across`."""
    values = _shifted(taps, "v", valid)
    return {name: _products(_shifted(taps, name, valid), values, valid) for name in KeysByValues._fields}


def whole_moments(found: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Float64 on the host of `layer_moments`, and the sums of its tokens themselves."""
    whole = {}
    for name, product in found.items():
        if isinstance(product, Products):
            whole[name], whole[f"{name}_sum"] = product.whole()
        else:
            whole[name] = to_host(product).astype(np.float64)
    return whole


def _shifted(taps: Sequence[Taps], name: str, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The valid tokens of a tap of several layers less their mean, float32 `[B * T, G * W]`, zeros in the place of the
    others; and that mean `[G * W]`."""
    parts = [jnp.where(valid[:, :, None, None], getattr(own, name), 0).astype(jnp.float32) for own in taps]
    x = jnp.concatenate([x.reshape(x.shape[0] * x.shape[1], -1) for x in parts], axis=-1)
    mean = x.sum(0) / jnp.maximum(valid.sum(), 1)
    return jnp.where(valid.reshape(-1, 1), x - mean, 0), mean


def _products(x: tuple[jax.Array, jax.Array], y: tuple[jax.Array, jax.Array], valid: jax.Array) -> Products:
    (of_x, a), (of_y, b) = x, y
    return Products(precise.matmul(of_x.T, of_y), a, b, of_x.sum(0), of_y.sum(0), valid.sum(dtype=jnp.float32))
