"""The contract of a codec, a selection, a reading or an estimator, for tests of one's own.

    from lowrank_kv_jax.testing import check_estimator, check_part

    check_part(MyCodec)            # AssertionError where it breaks a promise
    check_estimator("my-estimator")

A part declares the fields at which it is exact attention, `exact_at`, and those with which it compresses prompts of a
hundred tokens, `small`. On a tiny model with random weights it takes seconds.
"""

from lowrank_kv_jax.method import Part
from lowrank_kv_jax.testing.configurations import exact_configuration as exact_configuration
from lowrank_kv_jax.testing.configurations import small_configuration as small_configuration
from lowrank_kv_jax.testing.estimators import ESTIMATOR_PROMISES as ESTIMATOR_PROMISES
from lowrank_kv_jax.testing.estimators import check_estimator as check_estimator
from lowrank_kv_jax.testing.promises import PROMISES as PROMISES
from lowrank_kv_jax.testing.promises import equals_full_attention as equals_full_attention


def check_part(cls: type[Part]) -> None:
    """Ask every promise of a registered part.

    Raises:
        AssertionError: it breaks one; the message says what.
    """
    if cls.exact_at is not None:
        equals_full_attention(exact_configuration(cls))
    small = small_configuration(cls)
    for promise in PROMISES:
        promise(small)
