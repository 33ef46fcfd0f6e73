"""Which questions share a prefill: contexts of similar length in batches of one shape."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lowrank_kv_jax.evals.asking.prompts import Question, encode
from lowrank_kv_jax.generation.forward import DEFAULT_BLOCK
from lowrank_kv_jax.generation.prompts import PAD_TO

Ids = tuple[int, ...]
SMALL_ROOM = 256  # questions and answers up to so many tokens share one size of buffer


@dataclasses.dataclass(frozen=True)
class Batch:
    """Contexts that are prefilled together.

    Attributes:
        width: tokens that the contexts are padded to.
        capacity: width, and room for the longest question with its answer.
        contexts: ids of each.
        questions: of each context, with their ids; the rows that only fill the batch up have none.
    """

    width: int
    capacity: int
    contexts: tuple[Ids, ...]
    questions: tuple[tuple[tuple[Question, Ids], ...], ...]

    @property
    def rounds(self) -> int:
        """How often the caches are asked."""
        return max(map(len, self.questions))

    @property
    def all_questions(self) -> list[Question]:
        return [question for row in self.questions for question, _ in row]


Shapes = Callable[[Mapping[Ids, int], int], Mapping[Ids, tuple[int, int]]]
"""Width and capacity for each context, from the tokens that each needs room for behind it and from the model's
context."""


def few_shapes(needs: Mapping[Ids, int], longest: int) -> dict[Ids, tuple[int, int]]:
    """Widths rounded up coarsely, so that little has to be compiled."""
    small = max((need for need in needs.values() if need <= SMALL_ROOM), default=1)
    shapes = {}
    for head, need in needs.items():
        room = _round_up(small if need <= SMALL_ROOM else coarse(need), DEFAULT_BLOCK)
        room = min(room, longest - len(head))
        width = min(coarse(len(head)), longest - room)
        shapes[head] = width, width + room
    return shapes


def one_shape(needs: Mapping[Ids, int], longest: int) -> dict[Ids, tuple[int, int]]:
    """The longest context's, rounded up no further than prompts are."""
    width = _round_up(max(map(len, needs)), PAD_TO)
    capacity = width + _round_up(max(needs.values()), DEFAULT_BLOCK)
    return dict.fromkeys(needs, (min(width, longest), min(capacity, longest)))


SHAPES: Mapping[str, Shapes] = {"few": few_shapes, "one": one_shape}
"""By the names that a suite calls them."""


def make_batches(
    tokenizer: Any, questions: Sequence[Question], protocol: str, style: str, rows: int, longest: int,
    shapes: Shapes = few_shapes, multiple: int = 1,
) -> list[Batch]:
    """Batches of `rows` contexts, or as many as there are of a shape; questions about the same context share its row.

    The last batch of a shape is filled up with contexts that nothing is asked of.

    Args:
        longest: the model's context.
        multiple: of rows, which a mesh asks for.

    Raises:
        ValueError: a prompt with its answer is longer than the model's context, or as `encode`.
    """
    by_context: dict[Ids, list[tuple[Question, Ids]]] = {}
    for question in questions:
        head, tail = (tuple(ids) for ids in encode(tokenizer, question, protocol, style))
        _check(question, head, tail, longest)
        by_context.setdefault(head, []).append((question, tail))
    needs = {head: max(len(tail) + q.new_tokens for q, tail in asked) for head, asked in by_context.items()}
    same: dict[tuple[int, int], list[Ids]] = {}
    for head, shape in shapes(needs, longest).items():
        same.setdefault(shape, []).append(head)
    batches = []
    for (width, capacity), heads in sorted(same.items()):
        heads.sort(key=lambda head: max(q.new_tokens for q, _ in by_context[head]))  # alike ones end together
        size = min(rows, _round_up(len(heads), multiple))
        for begin in range(0, len(heads), size):
            real = heads[begin : begin + size]
            filled = real + [heads[i % len(heads)] for i in range(size - len(real))]
            asked = tuple(tuple(by_context[head]) for head in real) + ((),) * (size - len(real))
            batches.append(Batch(width, capacity, tuple(filled), asked))
    return batches


def coarse(tokens: int) -> int:
    """The next of 64, 128, 256, 512, 640, ... 1024, 1280, ... 2048, 2560, ...: four steps to the double where that
    saves work, and few shapes below, where compiling would cost more than the padding does."""
    power = 64
    while 2 * power < tokens:
        power *= 2
    return max(_round_up(tokens, power if power < 512 else power // 4), 64)


def _round_up(tokens: int, step: int) -> int:
    return -(-tokens // step) * step


def check_lengths(lengths: Sequence[int], longest: int, name: str = "length") -> None:
    """Raise ValueError for the first length beyond the model's context, before samples of it are made."""
    for length in lengths:
        if length > longest:
            raise ValueError(f"{name}={length}: is more than the model's context of {longest} tokens")


def _check(question: Question, head: Sequence[int], tail: Sequence[int], longest: int) -> None:
    total = len(head) + len(tail) + question.new_tokens
    if total > longest:
        raise ValueError(f"{question.task} sample {question.index}: {total} tokens, the answer included, are "
                         f"more than the model's context of "
                         f"{longest}")
    if not head or not tail:
        raise ValueError(f"{question.task} sample {question.index}: context and question need at least one "
                         f"token each")
