"""Bits of components, as bases carry them: numbers of the tree structure, and arrays on disk."""

import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.estimators.bit_allocation import Profile
from lowrank_kv_jax.storage.state import state, static
from lowrank_kv_jax.storage.water_filled import WIDTHS, bytes_of


@state
class Widths:
    """Numbers of the tree structure, so that groups of one profile share their programs.

    Attributes:
        layers: G, that the bases serve together.
        rungs: profiles of this group, the most bits first; one, but where bytes decide. None: components are floats.
        total: bytes of a token on each rung, keys and values, of one basis of every group of the model.
        fit: the method's `fit_key` as JSON; empty where bases were loaded, whose key was compared then.
    """

    layers: int = static()
    rungs: tuple[Profile, ...] = static()
    total: tuple[tuple[int, int], ...] = static()
    fit: str = static(default="")

    def only(self, rung: int) -> "Widths":
        """With one rung."""
        return Widths(self.layers, (self.rungs[rung],), (self.total[rung],), self.fit)

    def check_fit(self, method: str, wanted: dict[str, Any]) -> None:
        """Raise ValueError where the bases were fitted to other settings than a method's: their arrays may not tell."""
        found = json.loads(self.fit or "{}")
        for name, value in found.items():
            if value != wanted.get(name):
                raise ValueError(f"bases with {name}={value!r}: {method} with these settings takes "
                                 f"{name}={wanted.get(name)!r}; calibrate for it")


def total_bytes(profiles: Sequence[Profile]) -> tuple[int, int]:
    """Bytes of keys and of values of a token, of one basis of every group."""
    k, v = (sum(bytes_of(profile[side]) for profile in profiles) for side in (0, 1))
    return k, v


def with_saved_widths(bases: Any) -> dict[str, jax.Array]:
    """Bases, a NamedTuple with `widths` or None, as arrays by name.

    The widths are float32 `[1 + rungs, 2, 5]`, G everywhere, then components of each width and total bytes.
    """
    arrays = {name: x for name, x in bases._asdict().items() if name != "widths" and x is not None}
    if bases.widths is None:
        return arrays
    rungs = [
        [[dict(runs).get(bits, 0) for bits in WIDTHS] + [total] for runs, total in zip(profile, totals, strict=True)]
        for profile, totals in zip(bases.widths.rungs, bases.widths.total, strict=True)
    ]
    return arrays | {"widths": jnp.asarray(np.array([np.full((2, 5), bases.widths.layers), *rungs], np.float32))}


def with_restored_widths(arrays: dict[str, jax.Array]) -> dict[str, Any]:
    """What `with_saved_widths` returned, with the widths as they were."""
    if "widths" not in arrays:
        return dict(arrays)
    first, *rungs = np.asarray(arrays["widths"]).astype(int).tolist()

    def runs(side):
        return tuple((bits, count) for bits, count in zip(WIDTHS, side[:4], strict=True) if count)

    widths = Widths(first[0][0], tuple((runs(k), runs(v)) for k, v in rungs), tuple((k[4], v[4]) for k, v in rungs))
    return arrays | {"widths": widths}
