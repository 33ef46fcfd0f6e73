"""The linear layers of every family."""

import jax
import jax.numpy as jnp
from flax import nnx

PARTS = 8
LONG = 256  # inner sizes below are summed accurately enough in one go
MANY = 2  # times as many tokens as a token has channels


class Linear(nnx.Linear):
    """`nnx.Linear`, with partial sums where `jax_default_matmul_precision` is `highest` and XLA:CPU multiplies.

    XLA's CPU backend adds the products of a matrix-vector product one after the other. Eight partial sums halve the
    rounding error of a whole decoding step (SmolLM2: 1.4e-5 to 0.8e-5 of the logits, root mean square against float64).
    """

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """`[..., in]` to `[..., out]`."""
        kernel = self.kernel[...]
        if not _in_parts(kernel):
            return super().__call__(inputs)
        out = _product_in_parts(inputs, kernel)
        return out if self.bias is None else out + self.bias[...]


class LinearPair(nnx.Module):
    """Two linear maps of one input as one product: its weights `[in, 2, out]`, its biases `[2, out]`.

    The two have an axis of their own, so that a mesh cuts either along `out` and nothing moves between them. Of many
    tokens the result of both at once would be larger than the weights, and be held beside what it is for; then they
    are multiplied one after the other, which costs a copy of the weights.
    """

    def __init__(self, ins: int, outs: int, use_bias: bool):
        self.kernel = nnx.Param(jnp.zeros((ins, 2, outs)))
        if use_bias:
            self.bias = nnx.Param(jnp.zeros((2, outs)))
        self.use_bias = use_bias

    def __call__(self, inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`[..., in]` to `[..., out]` of the first and of the second, summed as `Linear` sums."""
        kernel = self.kernel[...]
        if inputs.size > MANY * kernel.shape[0] ** 2:
            first, second = (_product(inputs, kernel[:, i]) for i in range(2))
        else:
            out = _product(inputs, kernel)
            first, second = out[..., 0, :], out[..., 1, :]
        return (first + self.bias[0], second + self.bias[1]) if self.use_bias else (first, second)


def _product(inputs: jax.Array, kernel: jax.Array) -> jax.Array:
    """`[..., in]` by `[in, *out]`."""
    return _product_in_parts(inputs, kernel) if _in_parts(kernel) else jnp.tensordot(inputs, kernel, 1)


def _product_in_parts(inputs: jax.Array, kernel: jax.Array) -> jax.Array:
    """`[..., in]` by `[in, *out]`, the sum over `in` in `PARTS`."""
    parts = zip(jnp.split(inputs, PARTS, axis=-1), jnp.split(kernel, PARTS, axis=0), strict=True)
    sums = [jnp.tensordot(x, w, 1) for x, w in parts]
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


def _in_parts(kernel: jax.Array) -> bool:
    """Weights of several devices may be laid out along the inner axis, which is then not ours to cut."""
    inner = kernel.shape[0]
    return (
        jax.config.jax_default_matmul_precision == "highest" and kernel.dtype == jnp.float32  # pyright: ignore
        and inner >= LONG and inner % PARTS == 0 and jax.default_backend() == "cpu" and jax.device_count() == 1
    )
