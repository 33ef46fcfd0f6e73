"""Compiled programs are kept between runs, in the user's cache directory."""

import os

from lowrank_kv_jax.files import user_cache_directory


def enable_compilation_cache() -> None:
    """Turn JAX's persistent compilation cache on, unless it is set up already or there is no place for it.

    Not on a CPU: reading compiled CPU programs back can crash the process (jax-ml/jax issue 28908).
    """
    import jax

    if jax.config.jax_compilation_cache_dir is not None or not jax.config.jax_enable_compilation_cache:
        return
    if jax.default_backend() == "cpu":
        return
    directory = user_cache_directory() / "jax"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    if not os.access(directory, os.W_OK | os.X_OK):
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
