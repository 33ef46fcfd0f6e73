"""The two configurations of a part that its contract is asked of, as the part declares them."""

from lowrank_kv_jax.method import Part


def exact_configuration(cls: type[Part]) -> Part:
    """Where it is exact attention: `Part.exact_at`.

    Raises:
        ValueError: it declares none.
    """
    if cls.exact_at is None:
        raise ValueError(f"{cls.name}: declares no exact_at, fields at which it is exact attention")
    return cls(**cls.exact_at)


def small_configuration(cls: type[Part]) -> Part:
    """Where it compresses prompts of a hundred tokens: its defaults and `Part.small`."""
    return cls(**cls.small)
