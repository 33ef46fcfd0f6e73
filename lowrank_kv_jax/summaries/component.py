"""Summaries of evicted tokens as a stage of a composition."""

import dataclasses
from typing import ClassVar

from lowrank_kv_jax.summaries.moments import ORDERS

DTYPES = ("float32", "bfloat16", "float16", "int16")


@dataclasses.dataclass(frozen=True)
class Summary:
    """Moment statistics of whatever a selection evicts, merged as one more partial.

    Attributes:
        order: "0", "1" or "gaussian", see `summaries.moments`.
        dtype: of the means, "float32", "float16" or "bfloat16"; "int16", of covariances alone, in a step for each row.
            Of those of 16 bits int16 holds best after many evictions, and bfloat16 does not hold (docs/momentkv.md).
    """

    order: str = "1"
    dtype: str = "float32"

    name: ClassVar[str] = "moments"
    stage: ClassVar[str] = "summary"

    def __post_init__(self):
        if self.order not in ORDERS:
            raise ValueError(f"order={self.order!r}: allowed are {', '.join(ORDERS)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r}: allowed are {', '.join(DTYPES)}")


SUMMARIES = {Summary.name: Summary}
