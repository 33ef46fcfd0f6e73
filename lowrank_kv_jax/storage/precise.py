"""Products of float32 numbers in float32: left to themselves accelerators round the factors to bfloat16 or TF32."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Float, Float32

matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
"""As `jnp.matmul`."""
einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
"""As `jnp.einsum`."""


def gram(rows: Float[jax.Array, "*lead T W"]) -> Float32[jax.Array, "*lead W W"]:
    """X^T X, float32 `[..., W, W]`, of rows X `[..., T, W]`."""
    rows = rows.astype(jnp.float32)
    return matmul(rows.mT, rows)
