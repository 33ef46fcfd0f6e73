"""The kvpress peer: one prefill for many presses, and several rows at once, are what each press and row gives alone.

Run like test_kvpress.py; skipped where kvpress is absent.
"""

import pytest

pytestmark = pytest.mark.filterwarnings("default")
kvpress = pytest.importorskip("kvpress")
torch = pytest.importorskip("torch")

from lowrank_kv_jax.evals.asking.clock import PrefillClock  # noqa: E402
from lowrank_kv_jax.evals.peers.kvpress_answer import answer  # noqa: E402
from lowrank_kv_jax.evals.peers.kvpress_many import _KVzips, press_many  # noqa: E402
from lowrank_kv_jax.evals.peers.kvpress_presses import make_press  # noqa: E402

SPECS = ["full", "snapkv:2x", "adakv:4x", "kvzip:2x", "kvzip:4x", "kvzip:1x", "expected-attention:4x", "streamingllm:2x"]


class Words:
    """What KVzip asks of a tokenizer."""

    chat_template = None

    def encode(self, text, **options):
        return torch.tensor([[7, 8, 9]] if text else [[]], dtype=torch.long)


@pytest.fixture(scope="module")
def model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=64, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=4, head_dim=16, max_position_embeddings=512, initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(autouse=True)
def words(monkeypatch):
    from transformers import AutoTokenizer

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda name: Words())


def pressed(model, tokens, specs):
    with torch.inference_mode():
        return press_many(model, tokens, {spec: make_press(spec) for spec in specs})


def context(seed, length):
    return torch.randint(64, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def alone(model, tokens, spec):
    """Keys, values and masks of each layer by kvpress alone."""
    from transformers import DynamicCache

    cache, press = DynamicCache(), make_press(spec)
    for layer in model.model.layers:
        layer.self_attn.masked_key_indices = None
    with torch.inference_mode(), press(model):
        model.model(input_ids=torch.tensor([tokens]), past_key_values=cache)
    masks = [getattr(layer.self_attn, "masked_key_indices", None) for layer in model.model.layers]
    return [layer.keys for layer in cache.layers], [layer.values for layer in cache.layers], masks


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec not in ("full", "kvzip:1x")])
def test_one_prefill_serves_all_presses(model, spec):
    tokens = context(1, 150)
    keys, values, masks = alone(model, tokens, spec)
    found = pressed(model, tokens, SPECS)[spec]
    for layer in range(3):
        assert torch.equal(found.keys[layer], keys[layer].bfloat16())
        assert torch.equal(found.values[layer], values[layer].bfloat16())
        if masks[layer] is None:
            assert found.masked[layer] is None
        else:
            theirs = set(zip(*(x.tolist() for x in masks[layer][1:]), strict=True))
            assert set(zip(*(x.tolist() for x in found.masked[layer]), strict=True)) == theirs
    assert all(layer.self_attn.masked_key_indices is None for layer in model.model.layers)


def test_the_clock_tells_presses_apart(model):
    clock = PrefillClock()
    with torch.inference_mode():
        press_many(model, context(1, 150), {spec: make_press(spec) for spec in SPECS}, clock)
    assert clock.shared > 0 and set(clock.own) == set(SPECS) - {"full"}
    assert clock.alone("kvzip:4x") > clock.alone("full") == clock.shared


def test_kvzip_repeats_the_context_whatever_the_default_device(model):
    """What the tokenizer returns lies there, while kvpress takes the context to the CPU."""
    press = _KVzips([make_press("kvzip:2x")])
    press._context_ids, press._suffix_ids, press.prefix_length = torch.tensor([context(1, 150)]), torch.tensor([[7]]), 0
    with torch.device("meta"):
        pairs = press.prepare(model, Words())
    assert all(x.device.type == "cpu" for pair in pairs for x in pair)


def test_nothing_is_cut_at_one(model):
    found = pressed(model, context(1, 150), ["full", "kvzip:1x"])
    assert found["kvzip:1x"].masked == [None] * 3
    assert found["kvzip:1x"].nbytes == found["full"].nbytes == 2 * 3 * 4 * 16 * 2 * 150


def answers(model, rows, contexts, questions, most=6, stop_at=()):
    drawn = [[] for _ in rows]

    def take(row, token):
        drawn[row].append(token)
        return (row, len(drawn[row])) in stop_at

    fewer = []
    with torch.inference_mode():
        answer(model, rows, list(map(len, contexts)), questions, take, most, lambda: fewer.append(1))
    return drawn, len(fewer)


@pytest.mark.parametrize("spec", ["full", "snapkv:2x", "expected-attention:4x"])
def test_rows_of_different_lengths_answer_as_alone(model, spec):
    contexts = [context(seed, length) for seed, length in ((1, 150), (2, 147), (3, 150), (4, 149))]
    questions = [context(10 + row, length) for row, length in enumerate((3, 2, 5, 2))]
    rows = [pressed(model, tokens, [spec])[spec] for tokens in contexts]
    together, fewer = answers(model, rows, contexts, questions, stop_at={(0, 2), (3, 1)})
    assert fewer == 2 and list(map(len, together)) == [2, 6, 6, 1]
    for row, tokens in enumerate(contexts):
        single, _ = answers(model, [rows[row]], [tokens], [questions[row]])
        assert together[row] == single[0][: len(together[row])]


def test_the_full_cache_answers_as_the_model(model):
    """Its first tokens; later ones of a random model hang on what is rounded to 16 bits."""
    contexts = [context(seed, 100 + seed) for seed in range(6)]
    rows = [pressed(model, tokens, ["full"])["full"] for tokens in contexts]
    drawn, _ = answers(model, rows, contexts, [[3, 1, 4]] * 6, most=1)
    with torch.inference_mode():
        direct = [int(model(torch.tensor([[*tokens, 3, 1, 4]])).logits[0, -1].argmax()) for tokens in contexts]
    assert drawn == [[token] for token in direct] and len(set(direct)) > 1


def test_masked_slots_are_not_seen(model):
    """Masking a slot changes what follows as dropping it does."""
    import dataclasses

    tokens = context(6, 100)
    full = pressed(model, tokens, ["full"])["full"]
    cut = dataclasses.replace(full, keys=[x[:, :, 10:] for x in full.keys], values=[x[:, :, 10:] for x in full.values])
    heads, slots = (x.reshape(-1) for x in torch.meshgrid(torch.arange(4), torch.arange(10), indexing="ij"))
    masked = dataclasses.replace(full, masked=[(heads, slots)] * 3)
    assert answers(model, [masked], [tokens], [[5]]) == answers(model, [cut], [tokens], [[5]])
