"""What a CPU holds otherwise than other platforms: bfloat16 buffers as their bits, packed codes with their tokens last.

`hold` puts `Bits` and `TokensLast` in the place of arrays once a cache is filled, and `like_before` keeps it so from step
to step, also where a method gave back the array.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from lowrank_kv_jax.storage.backend import choose
from lowrank_kv_jax.storage.bits import Bits, bits_of
from lowrank_kv_jax.storage.over_tokens import TOKENS
from lowrank_kv_jax.storage.state import map_leaves
from lowrank_kv_jax.storage.tokens_last import TokensLast, tokens_last_of


def hold(tree: Any, mesh: Mesh | None) -> Any:
    """A state with its buffers of tokens as a CPU reads them best; elsewhere, and for kernels, as it is.

    Args:
        mesh: that it lies on; where slots are cut over it, packed codes stay as they are.
    """
    if jax.default_backend() != "cpu" or choose() != "xla":
        return tree
    whole = mesh is None or mesh.shape.get(TOKENS, 1) == 1

    def form(info, x):
        if info.axes[2:] == ("tokens", "bytes"):
            return tokens_last_of(x) if whole else x
        of_tokens = info.axes[2:3] in (("tokens",), ("end_tokens",))  # not those on lanes
        return bits_of(x) if of_tokens and x.dtype == jnp.bfloat16 else x

    return map_leaves(form, tree)


def like_before(before: Any, after: Any) -> Any:
    """The state `after` with what `hold` puts there wherever `before`, of the same structure otherwise, had it."""
    kept = jax.tree.leaves(before, is_leaf=_is_held)
    leaves, treedef = jax.tree.flatten(after, is_leaf=_is_held)
    return treedef.unflatten(_as(old, new) for old, new in zip(kept, leaves, strict=True))


def as_array(x: Any) -> jax.Array:
    """What `hold` replaced, or the array itself."""
    return x.widened() if _is_held(x) else x


def _is_held(x: Any) -> bool:
    return isinstance(x, Bits | TokensLast)


def _as(old: Any, new: Any) -> Any:
    if isinstance(old, TokensLast):
        return tokens_last_of(new)
    return bits_of(new) if isinstance(old, Bits) else new
