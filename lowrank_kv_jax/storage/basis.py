"""Coding tokens as coefficients in a basis.

A basis `[J, W, R]` serves J groups of kv heads; its width W is (K / J) * D, the channels of a group side by side:
J = K codes each head by itself, J = 1 all heads of the layer jointly, and anything between groups of heads. A basis
`[B, J, W, R]` belongs to the rows of a batch. Columns are orthonormal unless a method says otherwise.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Shaped

from lowrank_kv_jax.storage import precise
from lowrank_kv_jax.storage.cache_dtype import roomy


class Scaled(NamedTuple):
    """A basis in factors, U = diag(1 / weights) directions diag(columns), of which a product takes one after the other:
    directions in 8 bits are widened within it, exactly, and no basis in floats is written.

    Attributes:
        directions: `[J, W, R]`.
        weights: `[J, W]`; None stands for 1.
        factors: of the columns, `[R]`, `[J, R]` (one of them at least) or of each row of a batch `[B, J, R]`, of any
            float dtype. Their product alone would be a program on a GPU.
    """

    directions: jax.Array
    weights: jax.Array | None
    factors: tuple[jax.Array, ...]

    @property
    def columns(self) -> jax.Array:
        """Float32 `[J, R]` or `[B, J, R]`."""
        return product_of(self.factors)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array."""
        return (*jnp.broadcast_shapes(*(x.shape for x in self.factors))[:-1], *self.directions.shape[-2:])

    def array(self) -> jax.Array:
        """Float32 `[J, W, R]` or `[B, J, W, R]`."""
        wide = self.directions.astype(jnp.float32)
        wide = wide if self.weights is None else wide / self.weights.astype(jnp.float32)[..., None]
        return wide * self.columns[..., None, :]


def product_of(factors: Sequence[jax.Array]) -> jax.Array:
    """Float32, of arrays that broadcast."""
    return functools.reduce(jnp.multiply, (x.astype(jnp.float32) for x in factors))


@functools.partial(jax.tree_util.register_dataclass, data_fields=("whole",), meta_fields=("begin", "width"))
@dataclasses.dataclass(frozen=True)
class RowsOf:
    """Some rows of a basis whose others are of other layers: kernels read them where they lie.

    Attributes:
        whole: `[J, W', R]` or of each row of a batch `[B, J, W', R]`.
        begin, width: W rows of it, and the first.
    """

    whole: jax.Array
    begin: int
    width: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the rows."""
        return (*self.whole.shape[:-2], self.width, self.whole.shape[-1])

    def array(self) -> jax.Array:
        """The rows, `[J, W, R]` or `[B, J, W, R]`."""
        return jax.lax.dynamic_slice_in_dim(self.whole, self.begin, self.width, axis=self.whole.ndim - 2)


Basis = Float[jax.Array, "... J W R"] | Scaled | RowsOf
"""An array, factors of one, or a part of one."""


def _per_row(basis: jax.Array) -> str:
    return "b" if basis.ndim == 4 else ""


def project(basis: Float[jax.Array, "... J W R"], x: Float[jax.Array, "B T K D"]) -> Float[jax.Array, "B J T R"]:
    """Coefficients `[B, J, T, R]` of tokens `x` `[B, T, K, D]`: C = X U, in the dtype of `x`; of float16, whose range
    they may leave, float32."""
    groups, width = basis.shape[-3:-1]
    x = roomy(x)
    x = x.reshape(*x.shape[:2], groups, width)
    return precise.einsum(f"btjw,{_per_row(basis)}jwr->bjtr", x, basis.astype(x.dtype))


def reconstruct(
    basis: Float[jax.Array, "... J W R"], coefficients: Float[jax.Array, "B J T R"], kv_heads: int
) -> Float[jax.Array, "B K T D"]:
    """Tokens `[B, K, T, D]` from coefficients `[B, J, T, R]`: X^ = C U^T."""
    batch, groups, tokens, _ = coefficients.shape
    x = precise.einsum(f"bjtr,{_per_row(basis)}jwr->bjtw", coefficients, basis.astype(coefficients.dtype))
    per_group = kv_heads // groups
    return x.reshape(batch, groups, tokens, per_group, -1).swapaxes(2, 3).reshape(batch, kv_heads, tokens, -1)


def split_heads(
    basis: Shaped[jax.Array, "*rows J W R"], kv_heads: int
) -> Shaped[jax.Array, "*rows J {kv_heads}//J D R"]:
    """Split the width into (heads of the group, D): `[..., J, K / J, D, R]`."""
    *rows, groups, width, rank = basis.shape
    per_group = kv_heads // groups
    return basis.reshape(*rows, groups, per_group, width // per_group, rank)


def as_array(basis: Basis) -> jax.Array:
    """A basis that may be in factors, or a part of one, as an array of its own."""
    return basis.array() if isinstance(basis, Scaled | RowsOf) else basis


def whole_basis(basis: Basis, head_dim: int) -> tuple[jax.Array, int | None]:
    """The array in which a basis of heads of so many channels lies, and the first of its heads there; None where it is an
    array of its own."""
    if not isinstance(basis, RowsOf) or basis.whole.shape[-3] != 1:
        return as_array(basis), None
    return basis.whole, basis.begin // head_dim


def fold_query(basis: Basis, q: Float[jax.Array, "B T N D"], kv_heads: int) -> Float[jax.Array, "B T N R"]:
    """Queries in coefficient space `[B, T, N, R]` of `q` `[B, T, N, D]`: q~ = q U_h for kv head h of the query.

    Args:
        basis: `[J, W, R]` or of each row `[B, J, W, R]`.
    """
    batch, tokens, heads, dim = q.shape
    if isinstance(basis, Scaled):
        met = q if basis.weights is None else (q / _of_channels(basis.weights, heads, dim)).astype(roomy(q).dtype)
        found = _folded(basis.directions, met, kv_heads, jnp.float32)
        return (found * _of_components(basis.columns, heads)).astype(q.dtype)
    return _folded(as_array(basis), q, kv_heads, q.dtype)


def _folded(basis: jax.Array, q: jax.Array, kv_heads: int, dtype: Any) -> jax.Array:
    batch, tokens, heads, dim = q.shape
    by_head = split_heads(basis, kv_heads)
    groups, per_group = by_head.shape[-4:-2]
    q = q.reshape(batch, tokens, groups, per_group, -1, dim)
    product = f"btjhgd,{_per_row(basis)}jhdr->btjhgr"
    found = jnp.einsum(product, q, by_head.astype(q.dtype), preferred_element_type=dtype)
    return found.reshape(batch, tokens, heads, -1)


def expand_values(basis: Basis, out: Float[jax.Array, "B T N R"], kv_heads: int) -> Float[jax.Array, "B T N D"]:
    """Attention outputs in head space `[B, T, N, D]` from value-coefficient space `[B, T, N, R]`: o = o~ U_v^T.

    Args:
        basis: as for `fold_query`.
    """
    if isinstance(basis, Scaled):
        met = (out * _of_components(basis.columns, out.shape[2])).astype(roomy(out).dtype)
        found = _expanded(basis.directions, met, kv_heads)
        found = found if basis.weights is None else found / _of_channels(basis.weights, *found.shape[2:])
        return found.astype(out.dtype)
    return _expanded(as_array(basis), out, kv_heads)


def _expanded(basis: jax.Array, out: jax.Array, kv_heads: int) -> jax.Array:
    batch, tokens, heads, rank = out.shape
    by_head = split_heads(basis, kv_heads)
    groups, per_group = by_head.shape[-4:-2]
    out = out.reshape(batch, tokens, groups, per_group, -1, rank)
    out = jnp.einsum(f"btjhgr,{_per_row(basis)}jhdr->btjhgd", out, by_head.astype(out.dtype))
    return out.reshape(batch, tokens, heads, -1)


def _of_channels(weights: jax.Array, heads: int, dim: int) -> jax.Array:
    """`[N, D]` of `[J, W]`: what the channels of each query head are over."""
    by_head = weights.astype(jnp.float32).reshape(-1, dim)
    return jnp.repeat(by_head, heads // by_head.shape[0], axis=0)


def _of_components(columns: jax.Array, heads: int) -> jax.Array:
    """`[N, R]` of `[J, R]`, or `[B, 1, N, R]` of `[B, J, R]`."""
    spread = jnp.repeat(columns, heads // columns.shape[-2], axis=-2)
    return spread if columns.ndim == 2 else spread[:, None]
