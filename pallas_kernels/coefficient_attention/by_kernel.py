"""The op through a kernel that reads ranges of slots: parts of a buffer, and heads that lie behind each other in it."""

from lowrank_kv_jax.attention.partial import merge
from lowrank_kv_jax.pallas_kernels.owned_slots import rows_of


def coefficient_attention(kernel, q, tokens, *, scale, q_positions, causal, window, beside=None, interpret=False):
    """The op of `api.coefficient_attention` by a module's `attend_slots`; `Unsupported` for what that does not cover."""
    rows = rows_of(q, tokens, q_positions, causal, window)
    joins = beside is not None and kernel.JOINS
    part = kernel.attend_slots(
        rows.q, rows.tokens, rows.begin, rows.end, scale=scale, size=tokens.keys.shape[2], interpret=interpret,
        owner=rows.owner, **({"beside": rows.by_row(beside)} if joins else {}),
    )
    part = rows.heads_of(part, q.shape[2])
    return part if beside is None or joins else merge([beside, part])
