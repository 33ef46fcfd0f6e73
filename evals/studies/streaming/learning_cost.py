"""What learning adds to a prompt, by measures that a busy machine does not spoil (StreamingKV, table 9).

FLOPs and bytes are counted. Times are the least of many, of one layer's programs by themselves: all layers of a prompt
run the same two, one that attends and one that codes, and a whole prompt's time differs from one to the next by more than
what learning takes.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.evals.speed.roofline import count_flops, white_bases
from lowrank_kv_jax.generation.forward import DEFAULT_BLOCK, make_layout, prefill, start_reading
from lowrank_kv_jax.generation.groups import compress_group
from lowrank_kv_jax.generation.layers import layer_prefill, layer_prefill_coded
from lowrank_kv_jax.method import Part
from lowrank_kv_jax.methods.group_bases import bases_of_group
from lowrank_kv_jax.methods.parse import parse_method


class Counted(NamedTuple):
    """By XLA, of a compiled program; the body of a loop counts once."""

    flops: float
    bytes: float


@dataclasses.dataclass(frozen=True)
class PromptCost:
    """Of a prompt, one row.

    Attributes:
        flops: of the whole prompt, counted in the traced program, loops included.
        attending, coding: of one layer: its decoder layer over the prompt, and the cache that it makes of the prompt's
            tokens.
        attending_s, coding_s: the least seconds of these two over all rounds.
        layers: of the model.
    """

    spec: str
    flops: float
    attending: Counted
    coding: Counted
    attending_s: float
    coding_s: float
    length: int
    layers: int

    @property
    def seconds(self) -> float:
        """Of all layers of a prompt."""
        return self.layers * (self.attending_s + self.coding_s)


def prompt_costs(
    model: Any, specs: Sequence[str], length: int, rounds: int = 30, dtype: str = "float32",
) -> list[PromptCost]:
    """Count and time prompts of `length` random tokens, in bases of the shapes that calibration gives.

    Args:
        specs: methods whose layers have a cache each.
        rounds: in which all programs alternate, after one that is not counted.

    Raises:
        ValueError: a prompt that the model's context does not hold; a method that codes layers together.
    """
    config = model.config
    if length > config.context:
        raise ValueError(f"length={length}: more than the context of {config.context}")
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, config.vocab_size, (1, length)), jnp.int32)
    programs, flops, exact = {}, {}, None
    for spec in specs:
        method = parse_method(spec)
        if any(len(group) > 1 for group in method.layer_groups(config.attention)):
            raise ValueError(f"{spec}: its layers are coded together, and not counted alone")
        bases = white_bases(config.attention, method, dtype)
        attend, code = _programs(model, method, bases, tokens, dtype)
        if not method.attends_codes:
            attend = exact = exact or attend  # one program for all whose prompts attend exactly: timed once
        programs[spec], flops[spec] = (attend, code), _flops(model, method, bases, tokens, dtype)
    least = _least({id(own): own for pair in programs.values() for own in pair}, rounds)
    return [PromptCost(spec, flops[spec], *(_counted(own.compiled) for own in pair), *(least[id(own)] for own in pair),
                       length, config.num_layers) for spec, pair in programs.items()]


class Program(NamedTuple):
    """Compiled, with its arguments."""

    compiled: Any
    args: tuple[Any, ...]


def _programs(model: Any, method: Part, bases: Any, tokens: jax.Array, dtype: str) -> tuple[Program, Program]:
    """What the first layer runs over a prompt: attending, and coding what it attended to."""
    config, params, (_, length) = model.config, model.params, tokens.shape
    lengths, layout = jnp.full((1,), length, jnp.int32), _layout(model, length, dtype)
    own, weights = bases_of_group(method, config.attention, bases)[0], params["layers"][0]
    x, positions, _ = start_reading(config, params, tokens, lengths, twice=False)
    one, window = config.by_layer[0], config.windows[0]
    if method.attends_codes:
        args = weights, own, x, positions, lengths
        attend = layer_prefill_coded.lower(one, window, method, layout, *args, False).compile()
    else:
        args = weights, x, positions
        attend = layer_prefill.lower(one, window, *args).compile()
    _, taps = attend(*args)
    coded = own, (taps,), lengths
    return Program(attend, args), Program(compress_group.lower(method, layout, *coded).compile(), coded)


def _layout(model: Any, length: int, dtype: str):
    return make_layout(model.config, 1, length, length + DEFAULT_BLOCK, dtype=dtype).of_layer(0)


def _flops(model: Any, method: Part, bases: Any, tokens: jax.Array, dtype: str) -> float:
    def run(params, tokens, bases):
        return prefill(method, model.config, params, tokens, bases=bases, capacity=tokens.shape[1] + DEFAULT_BLOCK,
                       dtype=dtype)

    return count_flops(jax.make_jaxpr(run)(model.params, tokens, bases).jaxpr)


def _counted(compiled: Any) -> Counted:
    found = compiled.cost_analysis()
    return Counted(found["flops"], found["bytes accessed"])


def _least(programs: Mapping[int, Program], rounds: int) -> dict[int, float]:
    """The least seconds of each, all of them one after the other in every round."""
    least = dict.fromkeys(programs, float("inf"))
    for number in range(rounds + 1):
        for name, (compiled, args) in programs.items():
            begin = time.perf_counter()
            jax.block_until_ready(compiled(*args))
            if number:
                least[name] = min(least[name], time.perf_counter() - begin)
    return least
