"""Where a basis comes from: decompositions of second moments, and estimators that learn a subspace online."""

from lowrank_kv_jax.estimators import covariance, frequent_directions, gha, incremental_svd, oja  # noqa: F401
from lowrank_kv_jax.estimators.estimator import ESTIMATORS, Estimator, make_estimator

__all__ = ["ESTIMATORS", "Estimator", "make_estimator"]
