"""One exact prefill of a context, compressed by any number of kvpress' presses. Imports kvpress: import this late."""

import contextlib
import copy
import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from kvpress import BasePress, KVzipPress
from transformers import DynamicCache

from lowrank_kv_jax.evals.asking.clock import PrefillClock

Masked = tuple[torch.Tensor, torch.Tensor] | None
"""Heads and slots of a layer that kvpress masks, since it cannot drop them for single heads."""


@dataclasses.dataclass(frozen=True)
class Pressed:
    """What a press keeps of one context.

    Attributes:
        keys, values: of each layer, `[1, K, S, D]`; presses that only mask share the tensors of the full cache.
        masked: of each layer.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    masked: list[Masked]

    @property
    def length(self) -> int:
        """Slots of each layer, masked ones among them."""
        return self.keys[0].shape[2]

    @property
    def nbytes(self) -> int:
        """Of all keys and values; what is only masked is held."""
        return sum(x.numel() * x.element_size() for x in (*self.keys, *self.values))


def press_many(
    model: Any, tokens: Sequence[int], presses: Mapping[str, BasePress | None], clock: PrefillClock | None = None
) -> dict[str, Pressed]:
    """Every press with a copy of what one exact prefill computed, stored in bfloat16.

    Presses compress what a layer cached after it has attended to it, so that none of them changes what the others see.

    Args:
        model: of transformers.
        tokens: ids of the context.
        presses: by any name; None keeps everything.
        clock: is told what took how long; what KVzip reads a second time counts for each of its ratios.
    """
    clock = PrefillClock() if clock is None else clock
    zips = {spec: press for spec, press in presses.items() if isinstance(press, KVzipPress)}
    others = {spec: press for spec, press in presses.items() if press is not None and spec not in zips}
    cache, aside, zipped = DynamicCache(), _Aside(others, clock), _KVzips(list(zips.values())) if zips else None
    for layer in model.model.layers:
        _take_mask(layer.self_attn)
    before, begin = sum(clock.own.values()), time.perf_counter()
    with contextlib.ExitStack() as stack:
        if zipped is not None:
            stack.enter_context(zipped(model))  # reads the context again when it is left
        with aside(model):
            model.model(input_ids=torch.tensor([list(tokens)], device=model.device), past_key_values=cache)
        read = time.perf_counter()
        clock.shared += read - begin - (sum(clock.own.values()) - before)
    for spec in zips:
        clock.own[spec] += time.perf_counter() - read
    depth = len(cache.layers)
    keys, values = _in_16_bits([x.keys for x in cache.layers]), _in_16_bits([x.values for x in cache.layers])
    found = {spec: Pressed(keys, values, [None] * depth) for spec, press in presses.items() if press is None}
    if zipped is not None:
        found |= {spec: Pressed(keys, values, zipped.masked[press.compression_ratio]) for spec, press in zips.items()}
    for spec, layers in aside.layers.items():
        masked = [mask for _, _, mask in layers]
        shared = any(mask is not None for mask in masked)
        found[spec] = Pressed(keys if shared else [k for k, _, _ in layers],
                              values if shared else [v for _, v, _ in layers], masked)
    return {spec: found[spec] for spec in presses}


class _Aside(BasePress):
    """Lets presses compress copies of the cache; the cache itself stays whole."""

    def __init__(self, presses: Mapping[str, BasePress], clock: PrefillClock):
        self.presses, self.clock = presses, clock
        self.layers: dict[str, list[tuple[torch.Tensor, torch.Tensor, Masked]]] = {spec: [] for spec in presses}

    def post_init_from_model(self, model: Any) -> None:
        for press in self.presses.values():
            press.post_init_from_model(model)

    def forward_hook(self, module: Any, input: Any, kwargs: dict, output: Any) -> Any:
        for spec, press in self.presses.items():
            cache = copy.copy(kwargs["past_key_values"])
            layer = copy.copy(cache.layers[module.layer_idx])
            cache.layers = [*cache.layers[: module.layer_idx], layer]
            with self.clock.method(spec):
                press.forward_hook(module, input, kwargs | {"past_key_values": cache}, output)
            self.layers[spec].append((*_in_16_bits([layer.keys, layer.values]), _take_mask(module)))
        return output


class _KVzips(KVzipPress):
    """KVzip at several ratios, which cut the same scores at other places."""

    def __init__(self, presses: Sequence[KVzipPress]):
        self.ratios = [press.compression_ratio for press in presses]
        self.masked: dict[float, list[Masked]] = {}
        super().__init__(compression_ratio=max(self.ratios))

    def __call__(self, model: Any) -> Any:
        self.masked = {ratio: [None] * len(model.model.layers) for ratio in self.ratios}
        return super().__call__(model)

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """On the CPU, whatever torch's default device: kvpress puts the context there, and beside it what it asks."""
        self._suffix_ids = self._suffix_ids.cpu()
        with torch.device("cpu"):
            return super().prepare(*args, **kwargs)

    def compress_post(self, model: Any) -> None:
        for ratio in filter(None, self.ratios):
            self.compression_ratio = ratio
            super().compress_post(model)
            self.masked[ratio] = [_take_mask(layer.self_attn) for layer in model.model.layers]


def _take_mask(module: Any) -> Masked:
    """What kvpress has left on an attention layer to be masked, and nothing left there."""
    mask = getattr(module, "masked_key_indices", None)
    module.masked_key_indices = None
    return None if mask is None else (mask[1], mask[2])


def _in_16_bits(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [x.to(torch.bfloat16) for x in tensors]
