"""Configs as the installed transformers saves them: with every attribute that it has, in the places of its version."""

import json
import os

import pytest
from goldens.tiny_families import FAMILIES
from goldens.tiny_models import CONFIGS, DEEPSEEK, GPT_CONFIGS

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


@pytest.mark.parametrize("name, change, message", [
    ("deepseek_v2", {"qk_head_dim": 19}, r"qk_head_dim=19: must be qk_nope_head_dim \+ qk_rope_head_dim, 20"),
    ("gpt_neox", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_type 'linear'"),
])
def test_what_it_may_also_say_is_refused(name, change, message):
    with pytest.raises(ValueError, match=message):
        models.read_config(ALL[name] | change)
