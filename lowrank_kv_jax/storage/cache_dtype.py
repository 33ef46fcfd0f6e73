"""The dtypes that a cache may be stored in, which of them is the default, and rounding to one."""

from typing import TYPE_CHECKING, Any

from lowrank_kv_jax.checks.shown import short

if TYPE_CHECKING:
    import jax

CACHE_DTYPES = ("bfloat16", "float16", "float32")
"""What a command line offers."""


def default_cache_dtype() -> str:
    """bfloat16, on every platform: native to GPUs and TPUs, and on a CPU, which holds its bits (`bits.Bits`), measured as
    fast as float16, with the range of float32."""
    return "bfloat16"


def floating(dtype: Any) -> Any:
    """NumPy's dtype of what was given for one.

    Raises:
        TypeError: it is none, not a floating one, or one that JAX would hold as another, as float64 without
            `jax_enable_x64`.
    """
    import jax
    import jax.numpy as jnp  # as below

    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise TypeError(f"dtype={short(dtype)}: must be a floating dtype, such as {', '.join(CACHE_DTYPES)}")
    held = jax.dtypes.canonicalize_dtype(found)
    if held != found:
        raise TypeError(f"dtype={short(dtype)}: JAX would hold {held}, as jax_enable_x64 is off; must be a floating "
                        f"dtype of at most 32 bits, such as {', '.join(CACHE_DTYPES)}")
    return found


def roomy(x: "jax.Array") -> "jax.Array":
    """`x` in a dtype whose range sums of its numbers do not leave: float16 as float32."""
    import jax.numpy as jnp  # as below

    return x.astype(jnp.float32) if x.dtype == jnp.float16 else x


def narrow(x: "jax.Array", dtype: Any) -> "jax.Array":
    """`x` rounded to the dtype of a cache; what is finite stays so.

    Keys, values and coefficients beyond 65504 are clipped to it in float16. Infinities and NaN stay: a broken model has
    to be seen.
    """
    import jax.numpy as jnp  # here: a command line that lists the dtypes starts without it

    dtype = jnp.dtype(dtype)
    if dtype == jnp.float16:
        most = float(jnp.finfo(dtype).max)
        x = jnp.where(jnp.isinf(x), x, jnp.clip(x, -most, most))
    return x.astype(dtype)
