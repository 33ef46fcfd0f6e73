"""Questions asked of several contexts' pressed caches at once. Imports torch: import this late."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from lowrank_kv_jax.evals.peers.kvpress_many import Pressed


def answer(
    model: Any, rows: Sequence[Pressed], positions: Sequence[int], questions: Sequence[Sequence[int]],
    take: Callable[[int, int], bool], most: int, on_fewer_rows: Callable[[], None],
) -> None:
    """Decode greedily from every row, through kvpress' own attention.

    Every row reads its question token by token and then its answer; what all questions have in length is read in one
    step. Rows of other lengths are padded in front, by slots that kvpress masks as it masks what it drops. Rows leave
    the batch once half of it is done. What is made here lies on torch's default device, which must be the model's.

    Args:
        model: of transformers, with the attention that kvpress has patched.
        rows: one context each; they stay as they are.
        positions: of each row's first token of the question.
        questions: ids.
        take: called with a row and its next token; whether its answer ends with it.
        most: tokens of an answer.
        on_fewer_rows: called before the first step of a smaller batch.
    """
    batch = _Batch(model, rows, max(map(len, questions)) + most)
    at = min(map(len, questions))
    alive, done = list(range(len(rows))), [False] * len(rows)
    ids = [list(question[:at]) for question in questions]
    drawn = [0] * len(rows)
    while True:
        tokens = batch.step(ids, [positions[row] + at - len(ids[0]) for row in alive])
        for row, token in zip(alive, tokens, strict=True):
            if at >= len(questions[row]) and not done[row]:
                drawn[row] += 1
                done[row] = take(row, token) or drawn[row] == most
        if all(done[row] for row in alive):
            return
        ids = [[questions[row][at] if at < len(questions[row]) else token]
               for row, token in zip(alive, tokens, strict=True)]
        kept = [place for place, row in enumerate(alive) if not done[row]]
        if 2 * len(kept) <= len(alive):
            batch.keep(kept)
            alive, ids = [alive[place] for place in kept], [ids[place] for place in kept]
            on_fewer_rows()
        at += 1


class _Batch:
    """Caches of several rows, widened to float32 with room for what is appended."""

    def __init__(self, model: Any, rows: Sequence[Pressed], room: int):
        self.model, self.cache = model, DynamicCache()
        width = max(row.length for row in rows)
        pads = [width - row.length for row in rows]
        self.masks = []
        for index in range(len(model.model.layers)):
            self.cache.layers.append(_Layer([(row.keys[index], row.values[index]) for row in rows], width, room))
            self.masks.append(_mask([row.masked[index] for row in rows], pads, rows[0].keys[index].shape[1]))

    def step(self, ids: Sequence[Sequence[int]], positions: Sequence[int]) -> list[int]:
        """The likeliest tokens after these."""
        for layer, mask in zip(self.model.model.layers, self.masks, strict=True):
            layer.self_attn.masked_key_indices = mask
        places = torch.tensor(positions)[:, None] + torch.arange(len(ids[0]))
        out = self.model(torch.tensor(ids), past_key_values=self.cache, position_ids=places, logits_to_keep=1)
        for layer in self.model.model.layers:
            layer.self_attn.masked_key_indices = None
        return out.logits[:, -1].argmax(-1).tolist()

    def keep(self, places: Sequence[int]) -> None:
        """Go on with these rows only."""
        index = torch.tensor(places)
        place_of = torch.full((self.cache.layers[0].keys.shape[0],), -1)
        place_of[index] = torch.arange(len(places))
        for i, (layer, mask) in enumerate(zip(self.cache.layers, self.masks, strict=True)):
            layer.batch_select_indices(index)
            if mask is not None:
                rows = place_of[mask[0]]
                self.masks[i] = tuple(x[rows >= 0] for x in (rows, *mask[1:]))


class _Layer(DynamicLayer):
    """Buffers that are filled in place; what is appended is rounded to bfloat16, as what is there has been."""

    def __init__(self, rows: Sequence[tuple[torch.Tensor, torch.Tensor]], width: int, room: int):
        super().__init__()
        self.lazy_initialization(*2 * [torch.zeros(0)])
        shapes = [(len(rows), x.shape[1], width + room, x.shape[3]) for x in rows[0]]
        self.buffers = [torch.zeros(shape) for shape in shapes]
        for place, row in enumerate(rows):
            for buffer, x in zip(self.buffers, row, strict=True):
                buffer[place, :, width - x.shape[2] : width] = x[0]
        self._show(width)

    def _show(self, length: int) -> None:
        self.keys, self.values = (buffer[:, :, :length] for buffer in self.buffers)

    def update(self, key_states, value_states, *args, **kwargs):
        begin = self.keys.shape[2]
        end = begin + key_states.shape[2]
        for buffer, x in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, begin:end] = x.to(torch.bfloat16)
        self._show(end)
        return self.keys, self.values

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.buffers = [buffer[indices] for buffer in self.buffers]
        self._show(self.keys.shape[2])


def _mask(masked: Sequence[Any], pads: Sequence[int], heads: int) -> tuple[torch.Tensor, ...] | None:
    """kvpress' indices of what a layer does not see: rows, heads and slots of the padding and of what was masked."""
    found = []
    for row, (mask, pad) in enumerate(zip(masked, pads, strict=True)):
        if pad:
            padding = torch.cartesian_prod(torch.arange(heads), torch.arange(pad))
            found.append((torch.full((heads * pad,), row), padding[:, 0], padding[:, 1]))
        if mask is not None:
            found.append((torch.full_like(mask[0], row), mask[0], mask[1] + pad))
    if not found:
        return None
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))
