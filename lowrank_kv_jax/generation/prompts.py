"""Prompts as rows of ids of one width."""

import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from lowrank_kv_jax.checks.shown import check_text, short

PAD_TO = 64  # prompts are padded to multiples of it, so that prompts of similar length share their compiled programs

NO_ROWS = bytes | bytearray | memoryview | Mapping | Set  # iterable, but their items are numbers, names or in no order


def encode_prompts(
    model: Any, prompts: str | Sequence[str] | Sequence[Sequence[int]], *, opening: bool = True, one: str | None = None
) -> list[list[int]]:
    """Rows of ids from texts or ids.

    Args:
        opening: whether a text opens a sequence, and has the tokens that do; one that goes on has none.
        one: what errors call the only prompt; by default they say which of `prompts` it is.

    Raises:
        ValueError: no prompt, an empty one, a text that is no UTF-8, or an id outside the vocabulary.
    """
    if not isinstance(prompts, Iterable) or isinstance(prompts, NO_ROWS):
        raise ValueError(f"prompts={short(prompts)}: must be a text, several, or rows of ids")
    rows = [prompts] if isinstance(prompts, str) else list(prompts)
    if not rows:
        raise ValueError("prompts is empty: give at least one")
    ids = []
    for i, row in enumerate(rows):
        name = one or f"prompts[{i}]"
        if isinstance(row, str):
            if model.tokenizer is None:
                raise ValueError(f"this model has no tokenizer: give {one or 'prompts'} as lists of ids")
            check_text(name, row)
            row = model.tokenizer.encode(row, **({} if opening else {"add_special_tokens": False}))
        try:
            row = _ids(row)
        except TypeError as error:
            raise ValueError(f"{name}={short(row)}: must be a text, or a row of ids, which are ints") from error
        if not row:
            raise ValueError(f"{name} is empty: every prompt needs at least one token")
        wrong = [t for t in row if not 0 <= t < model.config.vocab_size]
        if wrong:
            raise ValueError(f"{name} holds id {short(wrong[0])}: ids lie in 0..{model.config.vocab_size - 1}")
        ids.append(row)
    return ids


def _ids(row: Any) -> list[int]:
    """A row of ids as a list; raises TypeError where it is none."""
    if isinstance(row, NO_ROWS):
        raise TypeError
    tokens = list(row)
    if any(isinstance(token, bool) for token in tokens):  # to Python alone True is an int
        raise TypeError
    return [operator.index(token) for token in tokens]


def rows_of_ids(name: str, rows: Any) -> list[list[int]]:
    """Rows of ints as lists.

    Raises:
        ValueError: they are none, as texts, bytes and numbers that are not whole.
    """
    try:
        return [_ids(row) for row in rows]
    except TypeError as error:
        raise ValueError(f"{name}={short(rows)}: must be rows of ids, which are ints") from error


def check_new_tokens(max_new_tokens: int, context: int) -> None:
    """Raise ValueError where they leave no room for a prompt."""
    if max_new_tokens >= context:
        raise ValueError(f"max_new_tokens={max_new_tokens}: must be at most {context - 1}, the context of the model, "
                         f"{context} tokens, less one of the prompt")


def check_lengths(rows: Sequence[Sequence[int]], longest: int, max_new_tokens: int, context: int) -> None:
    """Raise ValueError, with what helps, where a prompt has more than `longest` tokens."""
    lengths = [len(row) for row in rows]
    row = int(np.argmax(lengths))
    if lengths[row] > longest:
        more = context - lengths[row]
        remedy = f"max_new_tokens must be at most {more}, or the prompt shorter" if more > 0 else "give a shorter prompt"
        raise ValueError(f"prompts[{row}] has {lengths[row]} tokens: with max_new_tokens={max_new_tokens} it may have "
                         f"{longest}, for the model's context is {context}; {remedy}")


def pad_prompts(
    rows: Sequence[Sequence[int]], longest: int
) -> tuple[Int[jax.Array, "B S"], Int[jax.Array, " B"]]:
    """Rows padded on the right to one width, a multiple of `PAD_TO` where `longest` allows; tokens and lengths.

    Args:
        rows: none of more than `longest` tokens.
    """
    lengths = [len(row) for row in rows]
    width = min(-(-max(lengths) // PAD_TO) * PAD_TO, longest)
    tokens = np.zeros((len(rows), width), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return jnp.asarray(tokens), jnp.asarray(lengths, jnp.int32)
