"""A decode step of a layer of Llama 3.1 8B through a cache, compiled for hardware that is not there: what it would do."""

import dataclasses
import functools
import hashlib
import math
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lowrank_kv_jax.evals.speed.llama_8b import LLAMA_8B, layer_weights
from lowrank_kv_jax.evals.speed.roofline import white_bases
from lowrank_kv_jax.generation.groups import refresh_group
from lowrank_kv_jax.generation.layers import layer_extend
from lowrank_kv_jax.method import Layout, Part, Place
from lowrank_kv_jax.method.layout import layout_of
from lowrank_kv_jax.method.spread import why_whole
from lowrank_kv_jax.methods.compose import machine_of
from lowrank_kv_jax.methods.parse import spell_method
from lowrank_kv_jax.models.config import ModelConfig
from lowrank_kv_jax.pallas_kernels import dispatch
from lowrank_kv_jax.pallas_kernels.compile_grid import Result, tried
from lowrank_kv_jax.pallas_kernels.compile_only import compile_lowered, devices, kernels_in, lowered_for
from lowrank_kv_jax.storage.lanes import lay_out
from lowrank_kv_jax.storage.sharding import leaf_sharding
from lowrank_kv_jax.storage.state import map_leaves

_OP = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = (\(?.*?\)?) ([a-z\-]+)\(", re.MULTILINE)
_PREFETCH = re.compile(r"^.* = \((\S+?\{[^{}]*\))S\(1\)\}, \1\}, .*? copy-start\(.*$", re.MULTILINE)
COLLECTIVES = ("all-gather", "all-reduce", "collective-permute", "all-to-all", "reduce-scatter")
LAUNCHED = ("fusion", "custom-call", "while", "copy", "sort", *COLLECTIVES)
STATE = 2
MOVES = ("copy", "transpose", "convert", "copy-start")


def compile_step(
    method: Part, target: str, tokens: int = 32768, over: int = 1, axis: str = "model", known: set[str] | None = None,
) -> Result:
    """Facts of the compiled step, one row of bfloat16.

    `temporaries` are its bytes beside arguments and results; `loops` its `while`s; `kernels` what the device is given to
    run one after the other; `moved` and `collective` the elements of the largest array of tokens that is copied or
    converted as a whole, and of the largest that devices exchange; `padded` of the largest that a GPU pads, as it
    does before products that it cuts into parts; `seconds` of the CPU to compile it; `said` warnings
    of kernels that do not cover it; on sm_90 what the compiler says of the attention kernels, too, see `_attention`.

    Args:
        target: one of `compile_only.TARGETS`.
        tokens: that the cache is made for.
        over: devices, over which heads are cut, or slots of the store.
        axis: of the mesh that these devices are: "model", or "tokens".
        known: digests of the programs of calls before, to which this one's is added. One of them is not compiled again,
            and has no facts but `known`.

    Raises:
        NoCompiler: as `compile_only.device`.
    """
    program = functools.partial(step_program, method, target, tokens, over, axis)
    name = f"step at {tokens} tokens, {spell_method(method)}" + of_devices(over, axis)
    return program_facts(name, target, program, STATE, known)


def compile_refresh(method: Part, target: str, tokens: int = 32768) -> Result:
    """The same of a refresh of the group of the last layer; `libraries` are what it calls of cuBLAS and cuSOLVER.

    Raises:
        NoCompiler: as `compile_only.device`.
    """

    def program():
        step, (_, bases, state, *_) = step_program(method, target, tokens, 1)
        _, of, layout, _ = step.args
        return functools.partial(refresh_group, of, layout), (bases, state)

    return program_facts(f"refresh at {tokens} tokens, {spell_method(method)}", target, program, donate=1)


def of_devices(count: int, axis: str) -> str:
    """What a program's name says of them."""
    return f", {axis}={count}" if count > 1 else ""


def program_facts(
    name: str, target: str, program: Callable[[], tuple[Any, tuple[Any, ...]]], donate: int | tuple[int, ...] = (),
    known: set[str] | None = None,
) -> Result:
    """The same of any program, a function and the shapes of its arguments.

    Args:
        donate: numbers of arguments that the results may overwrite.
        known: as in `compile_step`.
    """
    return tried(name, target, functools.partial(_compiled, target, program, donate, known))


def _compiled(
    target: str, program: Callable[[], tuple[Any, tuple[Any, ...]]], donate: int | tuple[int, ...], known: set[str] | None
) -> dict[str, Any]:
    dispatch.warn_anew()
    of_gpu = target == "sm_90"
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        begin, f, args = time.process_time(), *program()
        lowered = lowered_for(target, f, *args, donate=donate)
        if known is not None:
            digest = hashlib.sha256(lowered.as_text().encode()).hexdigest()
            if digest in known:
                return {"known": True}
            known.add(digest)
        compiled = compile_lowered(lowered, folder if of_gpu else None)
        seconds, text = time.process_time() - begin, compiled.as_text()
        attention = _attention(folder) if of_gpu else {}
    entry = text[text.index("\nENTRY ") :]
    return {
        "temporaries": compiled.memory_analysis().temp_size_in_bytes, "loops": text.count(" while("),
        "kernels": sum(kind in LAUNCHED for _, kind in _ops(entry)),
        "moved": max((size for size, kind in _ops(_without_prefetches(entry), axes=4) if kind in MOVES), default=0),
        "padded": max((size for size, kind in _ops(text) if kind == "pad"), default=0) if of_gpu else 0,
        "collective": max((size for size, kind in _ops(text) if kind.removesuffix("-start") in COLLECTIVES), default=0),
        "libraries": sorted(set(re.findall(r'custom_call_target="[_$]*(cu[^"]+)"', text))), "seconds": seconds,
        "said": [str(x.message) for x in said if issubclass(x.category, RuntimeWarning)], **attention,
    }


def _attention(folder: str) -> dict[str, Any]:
    """Of all kernels of a step the most bytes spilled and of shared memory; of those of attention that read tokens ahead
    the narrowest copy, the fewest groups and bytes under way, and threads."""
    named = list(kernels_in(folder))
    found = [facts for _, facts in named]
    attention = [facts for name, facts in named if "attention" in name]
    ahead = [facts for facts in attention if facts.copies]
    return {
        "spilled": max((facts.spilled for facts in found), default=0),
        "shared": max((facts.shared for facts in found), default=0),
        "widths": sorted({width for facts in ahead for width in facts.copies}),
        "waits": min((facts.waits for facts in ahead), default=0),
        "in_flight": min((facts.in_flight for facts in ahead), default=0),
        "threads": min((facts.threads for facts in ahead), default=0),
        "attention_kernels": len(attention), "read_ahead": len(ahead),
    }


def step_program(
    method: Part, target: str, tokens: int, over: int, axis: str = "model"
) -> tuple[Any, tuple[Any, ...]]:
    """The last layer over one token: a function and the shapes of its arguments, of which `STATE` is the cache. Methods
    that leave layers alone leave the first ones."""
    config = _few_layers(method)
    mesh, layout = layout_over(method, config, target, tokens, over, axis)
    group = tuple(method.layer_groups(config.attention))[-1]
    layout, own = layout.of_group(group), white_bases(config.attention, method, layout.dtype)[-1]
    state = jax.eval_shape(lambda: lay_out(machine_of(method).init(layout, own), layout.tokens))
    state, everywhere = state_over(mesh, state), everywhere_on(mesh)
    weights, bases = (jax.tree.map(everywhere, tree) for tree in (layer_weights(config), own))
    integers = (everywhere(jax.ShapeDtypeStruct(shape, jnp.int32)) for shape in ((1, 1), (1,)))
    x = everywhere(jax.ShapeDtypeStruct((1, 1, config.hidden_size), jnp.bfloat16))
    step = functools.partial(layer_extend, config.by_layer[group[-1]], method, layout, Place(len(group) - 1))
    return step, (weights, bases, state, x, *integers)


def layout_over(
    method: Part, config: ModelConfig, target: str, tokens: int, over: int, axis: str
) -> tuple[Mesh, Layout]:
    """A mesh of devices that one can compile for, and the layout of a cache of one row over it."""
    mesh = Mesh(np.array(devices(target, over)).reshape(1, over), ("data", axis))
    layout = layout_of(config.attention, 1, tokens, block=method.default_block, dtype=jnp.bfloat16)
    rows = "rows" if target == "sm_90" else "lanes"
    return mesh, dataclasses.replace(layout, tokens=rows, mesh=mesh if over > 1 else None)


def axes_of(method: Part) -> list[str]:
    """Axes of a mesh that a method's step is compiled over in turn: heads, and slots where they can be cut."""
    return ["model"] if why_whole(machine_of(method)) else ["model", "tokens"]


def state_over(mesh: Mesh, state: Any) -> Any:
    """Shapes of a state as they lie on a mesh."""
    return map_leaves(lambda info, x: shape_on(x, leaf_sharding(mesh, info, x.shape)), state)


def everywhere_on(mesh: Mesh) -> Callable[[Any], jax.ShapeDtypeStruct]:
    """The shape of an array that every device holds."""
    return functools.partial(shape_on, sharding=NamedSharding(mesh, PartitionSpec()))


def _few_layers(method: Part) -> ModelConfig:
    """The model with few layers; four are the largest default group that comes without calibration."""

    def of(layers: int) -> ModelConfig:
        return dataclasses.replace(LLAMA_8B, num_layers=layers, windows=(None,) * layers)

    few = of(1 if method.calibrated else 4)
    try:
        method.layer_groups(few.attention)
    except ValueError:  # larger groups
        return of(8)
    return few


def _without_prefetches(text: str) -> str:
    """A program without the copies that bring an array as it lies into a TPU's own memory, S(1): they are the reading."""
    return _PREFETCH.sub("", text)


def shape_on(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    """The shape of an array that lies so."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _ops(text: str, axes: int = 0) -> Iterator[tuple[int, str]]:
    """Elements of the largest array that each operation gives, of those with so many axes, and its kind.

    Weights have two, what is cached of tokens at least four.
    """
    for shapes, kind in _OP.findall(text):
        found = [dims.split(",") for dims in re.findall(r"\[([\d,]*)\]", shapes)]
        yield max((math.prod(int(n) for n in dims if n) for dims in found if len(dims) >= axes), default=0), kind
