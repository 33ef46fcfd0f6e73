"""Packages that come with an extra: what needs one says so in one line, before anything is measured."""

import importlib.util

EXTRAS = {
    "datasets": "datasets", "lm_eval": "lm-eval", "matplotlib": "plot", "rouge": "evals", "starlette": "serve",
    "uvicorn": "serve", "wonderwords": "evals",
}
"""By the name that is imported."""


def check_extra(package: str, what: str) -> None:
    """Raise ValueError, with the remedy, unless the package of an extra can be imported.

    Args:
        package: one of `EXTRAS`.
        what: needs it.
    """
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"{what}: needs the package {package}, `pip install 'lowrank-kv-jax[{EXTRAS[package]}]'`")
