"""Index sets of the kvpress presets, against kvpress itself on a seeded random Llama; skipped where it is absent.

`uv run --no-group dev --extra kvpress --with pytest,pytest-xdist,hypothesis pytest tests/selections/test_kvpress.py` brings it; passed with
kvpress 0.5.5 and torch 2.13.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from eviction_oracle import kept_positions

from lowrank_kv_jax.attention.spec import AttentionSpec, Taps
from lowrank_kv_jax.generation.forward import prefill
from lowrank_kv_jax.method import Layout
from lowrank_kv_jax.methods import machine_of
from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.models.load import load_model

pytestmark = pytest.mark.filterwarnings("default")
kvpress = pytest.importorskip("kvpress")
torch = pytest.importorskip("torch")

LENGTH, LAYERS, WINDOW = 200, 4, 16
SPEC = AttentionSpec(LAYERS, 8, 4, 16, None, 4096, (None,) * LAYERS)


@pytest.fixture(scope="module")
def model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=8,
        num_key_value_heads=4, head_dim=16, max_position_embeddings=512, attn_implementation="sdpa",
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval().float()


@pytest.fixture(scope="module")
def layers(model):
    """Of each layer: the module, hidden states, keys, values, queries and position embeddings of a random prompt."""
    from kvpress.utils import get_prerope_query_states
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    torch.manual_seed(2)  # with seed 1 two scores tie exactly where the cut falls
    out = []
    with torch.no_grad():
        for layer in model.model.layers:
            hidden = torch.randn(1, LENGTH, 128)
            module = layer.self_attn
            cos, sin = model.model.rotary_emb(hidden, torch.arange(LENGTH)[None])
            keys, values = (
                project(hidden).view(1, LENGTH, 4, 16).transpose(1, 2) for project in (module.k_proj, module.v_proj))
            q, keys = apply_rotary_pos_emb(get_prerope_query_states(module, hidden), keys, cos, sin)
            out.append((module, hidden, keys, values, q, (cos, sin)))
    return out


def compressed(spec, layer, state):
    """One layer's cache after the prompt."""
    method = parse_method(spec)
    _, _, keys, values, q, _ = state
    layout = Layout(SPEC, 1, LENGTH, LENGTH, 1, "float32")
    q, k, v = (jnp.asarray(x.detach().numpy().swapaxes(1, 2)) for x in (q, keys, values))
    bases = method.default_bases(SPEC)[layer]
    empty = machine_of(method).init(layout, bases)
    lengths = jnp.asarray([LENGTH], jnp.int32)
    return machine_of(method).compress(layout, bases, empty, (Taps(q, k, k, v, k[:, :, 0]),), lengths)


def ours(spec, layer, state):
    """Positions that a method keeps of a layer, for each head."""
    held = compressed(spec, layer, state)
    return [sorted([*found, *range(LENGTH - WINDOW, LENGTH)]) for found in kept_positions(held, 4)]


def score(press, state):
    module, hidden, keys, values, _, rope = state
    with torch.no_grad():
        return press.score(module, hidden, keys, values, None, {"position_embeddings": rope})


@pytest.mark.parametrize("kept", [50, 120])
def test_snapkv(layers, kept):
    press = kvpress.SnapKVPress(1 - kept / LENGTH, window_size=WINDOW)
    for layer, state in enumerate(layers):
        theirs = score(press, state).topk(kept, dim=-1).indices[0].sort().values.tolist()
        assert ours(f"snapkv:kvpress,budget={kept},recent={WINDOW}", layer, state) == theirs


@pytest.mark.parametrize("kept", [50, 120])
def test_pyramidkv(layers, kept):
    press = kvpress.PyramidKVPress(1 - kept / LENGTH, window_size=WINDOW, beta=2)
    sizes = []
    for layer, state in enumerate(layers):
        count = press.get_layer_budget(state[0], LENGTH)
        sizes.append(count)
        theirs = score(press, state).topk(count, dim=-1).indices[0].sort().values.tolist()
        spec = f"pyramidkv:kvpress,budget={kept},recent={WINDOW},beta=2,allocation=kvpress"
        assert ours(spec, layer, state) == theirs
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("kept, alpha", [(50, 0.2), (120, 0.5)])
def test_adakv(layers, kept, alpha):
    press = kvpress.AdaKVPress(kvpress.SnapKVPress(1 - kept / LENGTH, window_size=WINDOW), alpha)
    for layer, state in enumerate(layers):
        module, hidden, keys, values, _, rope = state
        with torch.no_grad():
            press.compress(module, hidden, keys, values, None, {"position_embeddings": rope})
        _, heads, slots = module.masked_key_indices
        gone = [set(slots[heads == h].tolist()) for h in range(4)]
        theirs = [[p for p in range(LENGTH) if p not in gone[h]] for h in range(4)]
        spec = f"adakv:kvpress,budget={kept},recent={WINDOW},allocation=kvpress,alpha={alpha}"
        assert ours(spec, layer, state) == theirs
    assert len({len(x) for x in theirs}) > 1


class Silent:
    """A tokenizer of nothing: KVzip without the words that ask for a repetition, as ours reads."""

    def encode(self, text, **options):
        return torch.zeros((1, 0), dtype=torch.long)


@pytest.mark.parametrize("kept", [50, 120])
def test_kvzip(model, tmp_path, kept):
    from transformers import DynamicCache

    tokens, cache, press = torch.randint(64, (1, LENGTH)), DynamicCache(), kvpress.KVzipPress(1 - kept / LENGTH, layerwise=True)
    with torch.no_grad():
        model.model(input_ids=tokens, past_key_values=cache)
        for layer in model.model.layers:
            layer.self_attn.rotary_emb = model.model.rotary_emb
        press._context_ids, press._cache, press._suffix_ids = tokens, cache, Silent().encode("")
        press._perform_kvzip_compression(model, Silent())
    model.save_pretrained(tmp_path)
    mine = load_model(tmp_path, dtype="float32")
    held, _ = prefill(parse_method(f"kvzip:budget={kept},layers=uniform"), mine.config, mine.params, tokens.numpy(), dtype="float32")
    for layer, state in zip(model.model.layers, held.groups, strict=True):
        _, heads, slots = layer.self_attn.masked_key_indices
        layer.self_attn.masked_key_indices = None
        gone = [set(slots[heads == h].tolist()) for h in range(4)]
        theirs = [[p for p in range(4, LENGTH) if p not in gone[h]] for h in range(4)]
        assert [sorted(found) for found in kept_positions(state, 4)] == theirs
    assert len({len(x) for x in theirs}) > 1


def test_streamingllm(layers):
    press = kvpress.StreamingLLMPress(0.5, n_sink=4)
    theirs = score(press, layers[0]).topk(LENGTH // 2, dim=-1).indices[0, 0].sort().values.tolist()
    held, = compressed(f"streamingllm:budget={LENGTH // 2},sinks=4", 0, layers[0]).ends
    assert held.positions.at(jnp.arange(int(held.length[0])))[0].tolist() == theirs


def test_stored_keys_and_values(layers):
    """What is stored at a position is what kvpress keeps there, keys as they are cached: after RoPE."""
    press = kvpress.SnapKVPress(1 - 50 / LENGTH, window_size=WINDOW)
    module, hidden, keys, values, _, rope = layers[0]
    with torch.no_grad():
        theirs = press.compress(module, hidden, keys, values, None, {"position_embeddings": rope})
    coded = compressed(f"snapkv:kvpress,budget=50,recent={WINDOW}", 0, layers[0]).store.tokens
    for mine, kept in zip((coded.k, coded.v), theirs, strict=True):
        for head in range(4):
            mine_sorted, kept_sorted = (
                sorted(np.asarray(x)[0, head].tolist()) for x in (mine[:, :, : int(coded.length[0])], kept))
            for row in mine_sorted:
                assert np.abs(np.asarray(kept_sorted) - row).max(1).min() < 1e-6
