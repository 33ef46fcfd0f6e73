"""Configs as the installed transformers saves them: with every attribute that it has, in the places of its version."""

import json
import os

import pytest
from goldens.tiny_families import FAMILIES
from goldens.tiny_models import CONFIGS, DEEPSEEK, GPT_CONFIGS
from huggingface_hub.errors import StrictDataclassError

from lowrank_kv_jax import models

ALL = CONFIGS | GPT_CONFIGS | DEEPSEEK | FAMILIES


@pytest.fixture(scope="module")
def saved():
    """What transformers writes for a config."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoConfig

    return lambda config: json.loads(AutoConfig.for_model(**config).to_json_string())


@pytest.mark.parametrize("name", ALL)
def test_a_config_that_transformers_saves_says_the_same(name, saved):
    assert models.read_config(saved(ALL[name])) == models.read_config(ALL[name])


WIDE = {"vocab_size": 200_000, "hidden_size": 1024, "num_attention_heads": 64}
"""Every family's default of key heads and of tokens fits."""


def read(config):
    try:
        return models.read_config(config)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("name", ALL)
def test_what_a_config_leaves_out_is_what_transformers_takes(name, saved):
    """Attribute by attribute, left out or null, but for those that must be given and for null that transformers refuses."""
    config, compared = ALL[name] | {key: value for key, value in WIDE.items() if key in ALL[name]}, 0
    for attribute in config.keys() - {"model_type"}:
        left_out = {key: value for key, value in config.items() if key != attribute}
        for change in (left_out, left_out | {attribute: None}):
            if attribute == "rope_theta" and attribute in change:
                continue  # null there, transformers has no frequencies
            try:
                written = saved(change)
            except (StrictDataclassError, TypeError):  # transformers has no use for null there
                continue
            found, wanted = read(change), read(written)
            asked_for = isinstance(found, str) and ("is missing" in found or "must all be given" in found)
            assert asked_for or found == wanted, attribute
            compared += not asked_for
    assert compared > 4


@pytest.mark.parametrize("name, heads", (
    ("llama2", 64), ("mistral", 8), ("qwen2", 32), ("qwen3", 32), ("phi3", 64), ("mixtral", 8), ("smollm3", 4), ("qwen3_moe", 4),
    ("gemma2", 4), ("gemma3_text", 4), ("gpt_oss", 8),
))
def test_key_heads_that_a_config_does_not_speak_of(name, heads):
    config = {key: value for key, value in (ALL[name] | WIDE).items() if key != "num_key_value_heads"}
    assert models.read_config(config).kv_heads == heads


def test_caps_of_attention_are_gemma_2s_alone():
    """transformers' Gemma 3 has the field and does not read it; tokens' logits it caps."""
    caps = {"attn_logit_softcapping": 7.0, "final_logit_softcapping": 9.0}
    for name, cap in (("gemma2", 7.0), ("gemma3_text", None)):
        config = models.read_config(ALL[name] | caps)
        assert (config.logit_cap, config.output_cap) == (cap, 9.0)


def test_a_token_that_the_vocabulary_has_not_is_none():
    config = {key: value for key, value in ALL["smollm3"].items() if key not in ("bos_token_id", "eos_token_id")}
    assert (models.read_config(config).bos_id, models.read_config(config).eos_ids) == (None, ())
    assert models.read_config(config | {"vocab_size": 128_256}).eos_ids == (128_001,)


@pytest.mark.parametrize("name, change, message", [
    ("deepseek_v2", {"qk_head_dim": 19}, r"qk_head_dim=19: must be qk_nope_head_dim \+ qk_rope_head_dim, 20"),
    ("gpt_neox", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_type 'linear'"),
])
def test_what_it_may_also_say_is_refused(name, change, message):
    with pytest.raises(ValueError, match=message):
        models.read_config(ALL[name] | change)
