"""The op through a kernel that reads ranges of slots: parts of a buffer, and heads that lie behind each other in it."""

from typing import Any

from lowrank_kv_jax.attention.partial import AttnPartial, merge
from lowrank_kv_jax.pallas_kernels.owned_slots import rows_of
from lowrank_kv_jax.storage.cached_tokens import Beside


def coefficient_attention(
    kernel: Any, q, tokens, *, scale: float, q_positions, causal: bool, window: int | None, beside: Beside | None = None,
    interpret: bool = False,
) -> AttnPartial:
    """The op of `api.coefficient_attention` by a module's `attend_slots`; `Unsupported` for what that does not cover."""
    rows, common = rows_of(q, tokens, q_positions, causal, window), dict(scale=scale, interpret=interpret)
    read = beside is not None and kernel.reads_beside(tokens, beside.tokens)
    size = tokens.keys.shape[2] + (beside.tokens.keys.shape[2] if read else 0)
    part = kernel.attend_slots(
        rows.q, rows.tokens, rows.begin, rows.end, **common, size=size, owner=rows.owner,
        **({"beside": rows.beside(beside)} if read else {}),
    )
    part = rows.heads_of(part, q.shape[2])
    if beside is None or read:
        return part
    others = coefficient_attention(
        kernel, beside.q, beside.tokens, **common, q_positions=beside.q_positions, causal=beside.causal,
        window=beside.window,
    )
    return merge([others, part])
