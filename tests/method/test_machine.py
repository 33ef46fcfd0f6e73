"""What keeps the core one machine: a single implementation, contracts without exceptions, one table of refusals."""

import ast
import dataclasses
import inspect
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BLOCK, CAPACITY, PLAIN, PROMPT, bases_for, model, prompts, run, small_configuration

import lowrank_kv_jax as lkv
from lowrank_kv_jax import cli
from lowrank_kv_jax.attention.rope import RopeSpec
from lowrank_kv_jax.attention.spec import Taps
from lowrank_kv_jax.generation.forward import make_layout
from lowrank_kv_jax.method import REGISTRY, KVMethod, Place, register
from lowrank_kv_jax.method.codec import Ends, Logits, TokenCodec, with_others
from lowrank_kv_jax.methods import compose, machine_of
from lowrank_kv_jax.methods.compose import IMPOSSIBLE
from lowrank_kv_jax.methods.parse import parse_method, spell_method
from lowrank_kv_jax.pallas_kernels.coefficient_attention import coefficient_attention
from lowrank_kv_jax.segments.exact import Exact
from lowrank_kv_jax.selections.budgeted import Budgeted
from lowrank_kv_jax.storage.cached_tokens import CachedTokens
from lowrank_kv_jax.storage.state import state

ROOT = Path(__file__).parents[2]
CORE = [p for folder in ("method", "methods", "codecs", "selections") for p in (ROOT / "lowrank_kv_jax" / folder).glob("*.py")]
EIGHT = dataclasses.replace(PLAIN, q_heads=16, kv_heads=8, head_dim=4, rope=RopeSpec(10000.0, 4))


def test_one_class_implements_the_contract_of_a_method():
    def below(cls):
        return [x for sub in cls.__subclasses__() for x in (sub, *below(sub))]

    ours = [cls for cls in below(KVMethod) if cls.__module__.startswith("lowrank_kv_jax.")]
    assert [cls.__name__ for cls in ours] == ["Machine"]


def test_codecs_and_selections_are_asked_and_not_looked_at():
    """No isinstance or hasattr on them in the machine; storages are told apart in their own folder."""
    parts = {"Codec", "TokenCodec", "Selection", "LowRank", "Budgeted", *(cls.__name__ for cls in REGISTRY.values())}
    found = []
    for path in CORE:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
                names = {n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)}
                found += [f"{path.name}: {name}" for name in names & parts]
    assert not found


# ---- every pair, in shapes: what init foretells is what every step returns ------------------------------------------

VARIANTS = (
    "ojakv:rank=4,bits=4", "ojakv:paper,rank=4", "ojakv:rank=4,rope=pre", "ojakv:rank=4,heads=joint", "eigenattention:rank=4",
    "osp-static:rank=4,gamma=sqrt_rank", "single-svd:rank=8", "palu:rank=0.5", "palu:rank=0.5,head_group=1",
    "streamingkv:rank=0.5,update=joint", "kivi", "kivi:int8", "xkv:rank=24,bits=4",
    "transform:bits=1.5,heads=per_head", "transform:smaller=0.5,sinks=4,recent=8,group=2",
    "transform:bits=2,heads=per_head,rope=post,steps=prompt",
    "transform:bits=2,heads=per_head,kv=joint,steps=prompt", "transform:smaller=0.5,sinks=4,recent=8,group=2,kv=joint",
)
RULES = ("snapkv", "snapkv:paper", "h2o", "scissorhands", "adakv", "pyramidkv", "kvzip", "momentkv",
         "adakv:budget_bytes=300000,keep=none", "snapkv+moments", "adakv+moments:order=gaussian")
QUICK = {(codec, RULES[i * 3 % len(RULES)]): (PLAIN, EIGHT)[i % 2] for i, codec in enumerate(VARIANTS)}


def shapes(tree):
    return jax.tree.structure(tree), [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("codec, rule, config", [
    pytest.param(codec, rule, config, id=f"{codec}-{rule}-{config.kv_heads}",
                 marks=() if QUICK.get((codec, rule)) is config else pytest.mark.slow)
    for codec in VARIANTS for rule in RULES for config in (PLAIN, EIGHT)])
def test_every_step_keeps_the_shapes_that_init_foretells(codec, rule, config):
    part, spec = parse_method(f"{codec}+{rule}"), config.attention
    bases = bases_for(part, config) if part.calibrated else None
    method, layout = machine_of(part), make_layout(config, 2, PROMPT, CAPACITY, BLOCK, jnp.float32)
    own, layers = method.group_bases(spec, bases)[-1], len(method.layer_groups(spec)[-1])

    def of(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    def taps(tokens):
        q, k = (of(2, tokens, heads, spec.head_dim) for heads in (spec.q_heads, spec.kv_heads))
        return Taps(q, k, k, k, of(2, tokens, config.hidden_size), of(2, spec.kv_heads, tokens) if part.rereads else None)

    def step(cache, new, counts, positions):
        place = Place(layers - 1, None)
        cache = method.append(layout, own, cache, new, counts, positions, place)
        out = method.attend(layout, own, cache, new.q, positions, place)
        return method.observe(layout, own, cache, new.q, out.lse, positions, place)

    rows = of(2, dtype=jnp.int32)
    empty = jax.eval_shape(lambda: method.init(layout, own))
    full = jax.eval_shape(lambda c, t, n: method.compress(layout, own, c, t, n), empty, (taps(PROMPT),) * layers, rows)
    stepped = jax.eval_shape(step, full, taps(1), rows, of(2, 1, dtype=jnp.int32))
    fresh = jax.eval_shape(lambda c: method.refresh(layout, own, c), stepped)
    assert shapes(empty) == shapes(full) == shapes(stepped) == shapes(fresh)


@pytest.mark.parametrize("entry", IMPOSSIBLE, ids=lambda entry: entry.what)
def test_every_refusal_of_the_table_is_met_and_gives_its_reason(entry):
    specs = ("momentkv+moments", "momentkv:nc=false+moments:order=0", "ojakv+streamingllm", "osp+snapkv",
             "kivi+snapkv:positions=cache", "ojakv+momentkv:schedule=paper",
             "xkv:rebuild=8+snapkv", "xkv:recompress=8+snapkv", "xkv:rebuild=8+quest",
             "transform:smaller=4+h2o:budget_bytes=9999")
    said = []
    for spec in specs:
        with pytest.raises(ValueError) as error:
            parse_method(spec)
        said.append(str(error.value))
    assert any(entry.what in text and entry.why in text for text in said)


# ---- a part of one's own: one file ---------------------------------------------------------------------------------


@pytest.fixture
def toys():
    """A selection and a codec that a user registers, gone again after the test."""

    @register("toy-selection")
    @dataclasses.dataclass(frozen=True)
    class ToySelection(Budgeted):
        """Tokens with the longest values stay."""

        decoding: str = "keep"

        def prompt_scores(self, layout, tap, lengths):
            return jnp.sum(tap.v.astype(jnp.float32) ** 2, -1).swapaxes(1, 2)

    @state
    class Halves:
        tokens: Exact

    @register("toy-codec")
    @dataclasses.dataclass(frozen=True)
    class ToyCodec(TokenCodec):
        """Keys and values of half their size."""

        def ends(self, layout, bases):
            return Ends(4, 8)

        def units(self, spec, bases):
            return spec.kv_heads

        def empty(self, layout, bases, size, positions=None):
            heads = layout.spec.kv_heads if positions is None else positions.position.shape[1]
            buffer = jnp.zeros((layout.batch, heads, size, layout.spec.head_dim), layout.dtype)
            none, gaps = jnp.zeros((layout.batch,), jnp.int32), jnp.zeros((layout.batch, 2), jnp.int32)
            return Halves(Exact(buffer, buffer, none, lkv_runs(gaps) if positions is None else positions))

        def encode(self, layout, bases, store, tokens):
            return tokens[0].k.swapaxes(1, 2) / 2, tokens[0].v.swapaxes(1, 2) / 2

        def decode(self, layout, bases, store, k, v, positions, index):
            return 2 * k, 2 * v

        def attend(self, layout, bases, store, q, positions, place, beside=None):
            kept = CachedTokens(store.tokens.k, store.tokens.v, store.tokens.length, store.tokens.positions)
            part = coefficient_attention(2 * q, kept, scale=layout.spec.scale, q_positions=positions, causal=False,
                                         window=place.window)
            return with_others(layout.spec, part._replace(out=2 * part.out), beside)

        def logits(self, layout, bases, store, q, place):
            return Logits(2 * q, store.tokens.k)

    yield ToySelection, ToyCodec
    for name in ("toy-selection", "toy-codec"):
        del REGISTRY[name]


def lkv_runs(gaps):
    from lowrank_kv_jax.storage.positions import Runs

    return Runs(gaps, gaps)


def test_a_part_of_ones_own_reaches_everything(toys, tmp_path, capsys):
    tokens = prompts(length=PROMPT + 2 * BLOCK)
    exact = run(REGISTRY["full"](), PLAIN, tokens, PROMPT)[1]
    _, coded = run(REGISTRY["toy-codec"](), PLAIN, tokens, PROMPT)
    np.testing.assert_allclose(coded, exact, atol=1e-4)  # halves are exact
    for spec in ("toy-selection:keep=1.0", "toy-codec+toy-selection:keep=1.0", "toy-codec+snapkv:keep=1.0+moments"):
        method = parse_method(spec)
        assert parse_method(spell_method(method)) == method
        cache, logits = run(method, PLAIN, tokens, PROMPT)
        np.testing.assert_allclose(logits, exact, atol=1e-4)
        saved = types.SimpleNamespace(name="tiny", config=PLAIN, fingerprint="f" * 64)
        lkv.save_cache(tmp_path / "cache", cache, saved)
        assert lkv.cache_bytes(lkv.load_cache(tmp_path / "cache", method, saved)) == lkv.cache_bytes(cache)
    rows = lkv.take_rows(lkv.fork(cache, 2), [0, 3])
    assert rows.layout.batch == 2
    assert cli.main(["methods", "toy-codec"]) == 0 and "half their size" in capsys.readouterr().out
    assert inspect.getfile(type(parse_method("toy-codec"))) == inspect.getfile(sys.modules[__name__])
    assert bases_for(small_configuration(REGISTRY["toy-codec"])) is not None and model().config is PLAIN
    assert compose(REGISTRY["toy-codec"]()).name == "toy-codec"


@pytest.mark.parametrize("slots, unit, expected", [(0, 1, 0), (8191, 1, 8191), (32736, 1, 32768), (8192, 1, 8192), (8193, 48, 8448)])
def test_many_slots_are_whole_registers(slots, unit, expected):
    assert make_layout(PLAIN, 1, 16, 32, 16).whole_slots(slots, unit) == expected
