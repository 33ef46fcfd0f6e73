"""The bits at which a cache has a wanted size: all of its bytes but those of the bases, which all requests share."""

import bisect
from collections.abc import Callable
from typing import Any

from lowrank_kv_jax.codecs.transform_bases import TransformBases
from lowrank_kv_jax.codecs.widths import Widths
from lowrank_kv_jax.method import Layout
from lowrank_kv_jax.method.accounting import full_cache_bytes, state_bytes


def largest_rung(layout: Layout, bases: TransformBases, weigh: Callable[[Layout, Any], Any], smaller: float) -> int:
    """The same rung for every group, found by what a token takes on average.

    A row may hold something of each component, too (its step). Of how many, every group knows of itself alone: here it
    is of all, or of eight a byte where there are fewer, so that all find the same rung and the cache is no larger.

    Args:
        weigh: as for `Codec.settled`.

    Raises:
        ValueError: no bits make the cache as small.
    """
    widths, spec, share = bases.widths, layout.spec, bases.layers / layout.spec.num_layers
    target = full_cache_bytes(spec, layout.batch * layout.capacity) * share / smaller

    codes = len(bases.coded)

    def with_run(bits: int, count: int) -> int:  # of each of a token's codes
        runs = ((bits, count),)
        profile = (runs, runs if codes == 2 else ())
        return state_bytes(weigh(layout, bases._replace(widths=Widths(bases.layers, (profile,), ((0, 0),)))))

    one, two, eight = with_run(8, 1), with_run(8, 2), with_run(1, 8)  # components; in one byte, two, one
    none, component = 2 * one - two, (eight - one) / (7 * codes)
    byte = (two - one) / codes - component
    most = 2 * spec.num_layers * spec.kv_heads * spec.head_dim // bases.k.shape[0] // codes

    def spent(rung: int) -> float:
        total = widths.total[rung]
        return none + share * (byte * sum(total) + component * sum(min(8 * own, most) for own in total))

    rung = bisect.bisect_left(range(len(widths.rungs)), True, key=lambda i: spent(i) <= target)
    if rung == len(widths.rungs):
        raise ValueError(f"smaller={smaller}: a prompt of {layout.prompt} tokens (capacity {layout.capacity}) "
                         f"is too short for it: with the fewest bits {bases.layers} layers take "
                         f"{int(spent(rung - 1))} bytes of the {int(target)} wanted, exact tokens included; use a "
                         "smaller ratio, or fewer sinks and recent tokens")
    return rung
