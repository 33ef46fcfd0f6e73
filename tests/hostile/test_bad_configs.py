"""Values of a model's config.json by the table: the family, what is changed, and words of the refusal."""

import json
import math

import pytest
from goldens.tiny_models import CONFIGS, DEEPSEEK, GPT_CONFIGS
from refusing import refused

from lowrank_kv_jax.checks.json_objects import read_json_object
from lowrank_kv_jax.models.hf_checkpoint import open_hf_directory

INF, NAN = math.inf, math.nan
FAMILIES = CONFIGS | GPT_CONFIGS | DEEPSEEK
_LINEAR = {"rope_type": "linear", "factor": 4.0}
_LLAMA3 = CONFIGS["llama3.1"]["rope_scaling"]
_YARN = DEEPSEEK["deepseek_v2_yarn"]["rope_scaling"]

TABLE = (
    ("llama2", {"vocab_size": -1}, "vocab_size=-1 is not an integer in 1..2147483647"),
    ("llama2", {"vocab_size": 2.5}, "vocab_size=2.5 is not an integer"),
    ("llama2", {"vocab_size": True}, "vocab_size=True is not an integer"),
    ("llama2", {"vocab_size": "96"}, "vocab_size='96' is not an integer"),
    ("llama2", {"hidden_size": []}, "hidden_size=[] is not an integer"),
    ("llama2", {"hidden_size": None}, "hidden_size is missing"),
    ("llama2", {"hidden_size": 0}, "hidden_size=0 is not an integer in 1..2147483647"),
    ("llama2", {"hidden_size": 2}, "rotary_dim must be a positive even number of at most 65536, got 0"),
    ("llama2", {"intermediate_size": 2**31}, "intermediate_size=2147483648 is not an integer in 1..2147483647"),
    ("llama2", {"num_hidden_layers": 10**12}, "num_hidden_layers=1000000000000 is not an integer in 1..4096"),
    ("llama2", {"num_attention_heads": 0}, "num_attention_heads=0 is not an integer in 1..65536"),
    ("llama2", {"num_key_value_heads": 3}, "q_heads must be a multiple of kv_heads"),
    ("llama2", {"num_key_value_heads": [2]}, "num_key_value_heads=[2] is not an integer"),
    ("llama2", {"head_dim": 7}, "rotary_dim must be a positive even number of at most 65536, got 7"),
    ("llama2", {"head_dim": -16}, "head_dim=-16 is not an integer in 1..65536"),
    ("llama2", {"max_position_embeddings": 2**31}, "max_position_embeddings=2147483648 is not an integer"),
    ("llama2", {"max_position_embeddings": {}}, "max_position_embeddings={} is not an integer"),
    ("llama2", {"rms_norm_eps": -1}, "rms_norm_eps=-1 is not a finite number in 0..1"),
    ("llama2", {"rms_norm_eps": NAN}, "rms_norm_eps=nan is not a finite number"),
    ("llama2", {"rms_norm_eps": {}}, "rms_norm_eps={} is not a finite number"),
    ("llama2", {"rope_theta": 0}, "rope_theta=0 is not a finite number in 1..inf"),
    ("llama2", {"rope_theta": INF}, "rope_theta=inf is not a finite number"),
    ("llama2", {"rope_theta": 10**400}, "rope_theta=1000"),
    ("llama2", {"rope_theta": 1e300}, "rope theta 1e+300: must be a finite number above 1 and at most 1e+15"),
    ("llama2", {"rope_scaling": 5}, "rope_scaling=5 is not an object"),
    ("llama2", {"rope_scaling": {"rope_type": 5}}, "rope rope_type=5: must be a string"),
    ("llama2", {"rope_scaling": {"rope_type": "magic"}}, "rope_type 'magic' is not supported; it must be one of"),
    ("llama2", {"rope_scaling": _LINEAR | {"factor": INF}}, "rope factor=inf: must be a finite number"),
    ("llama2", {"rope_scaling": _LINEAR | {"factor": "4"}}, "rope factor='4': must be a finite number"),
    ("llama2", {"rope_scaling": _LINEAR | {"factor": 0.5}}, "rope factor 0.5: must be a finite number of at least 1"),
    ("llama2", {"rope_scaling": _LINEAR | {"factor": 1e300}}, "rope factor 1e+300: must be a finite number of at least 1"),
    ("llama2", {"rope_scaling": _LINEAR | {"factor": 1e12}}, "context must be at most 2147483647"),
    ("llama2", {"rope_scaling": _LINEAR | {"original_max_position_embeddings": 1e300}}, "must lie in 1..2147483647"),
    ("llama2", {"rope_scaling": _LINEAR | {"magic": 1}}, "missing [], unknown ['magic']"),
    ("llama2", {"rope_scaling": {"rope_type": "linear"}}, "missing ['factor']"),
    ("llama2", {"rope_parameters": {"rope_theta": 0.5}}, "rope theta 0.5: must be a finite number above 1"),
    ("llama2", {"rope_parameters": {"partial_rotary_factor": 2}}, "rope partial_rotary_factor=2: must lie in 0..1"),
    ("llama2", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor must be 1.0"),
    ("longchat", {"rope_condense_ratio": -1}, "rope_condense_ratio=-1 is not a finite number in 1..inf"),
    ("llama3.1", {"rope_scaling": _LLAMA3 | {"high_freq_factor": 1.0}}, "the first above 0 and below the second"),
    ("llama3.1", {"rope_scaling": _LLAMA3 | {"low_freq_factor": -1}}, "low_freq_factor -1.0"),
    ("llama3.1", {"rope_scaling": _LLAMA3 | {"low_freq_factor": None}}, "missing ['low_freq_factor']"),
    ("llama3.1", {"rope_scaling": _LLAMA3 | {"original_max_position_embeddings": 0}}, "must lie in 1..2147483647"),
    ("llama2", {"attention_bias": "yes"}, "attention_bias='yes' is not true or false"),
    ("llama2", {"tie_word_embeddings": 2}, "tie_word_embeddings=2 is not true or false"),
    ("llama2", {"eos_token_id": "end"}, "eos_token_id='end' is not an integer"),
    ("llama2", {"eos_token_id": [2, None]}, "eos_token_id=[2, None] is not an integer"),
    ("llama2", {"eos_token_id": -2}, "eos_token_id=-2 is not an integer in 0..2147483647, or a list of these"),
    ("llama2", {"bos_token_id": -1}, "bos_token_id=-1 is not an integer"),
    ("llama2", {"bos_token_id": 1.0}, "bos_token_id=1.0 is not an integer"),
    ("llama2", {"model_type": ["llama"]}, "model_type ['llama'] is not supported; it must be one of"),
    ("llama2", {"model_type": {}}, "model_type {} is not supported"),
    ("llama2", {"model_type": None}, "model_type None is not supported"),
    ("llama2", {"model_type": "x" * 9999}, "is not supported; it must be one of"),
    ("llama2", {"hidden_act": "relu"}, "hidden_act='relu' is not supported, only 'silu'"),
    ("llama2", {"hidden_act": ["silu"] * 999}, "is not supported, only 'silu'"),
    ("llama2", {"clip_qkv": 8}, "clip_qkv=8 is not known"),
    ("llama2", {"clip_qkv": [8] * 9999}, "clip_qkv=[8, 8"),
    ("mistral", {"sliding_window": -5}, "sliding_window=-5 is not an integer in 1..2147483647"),
    ("mistral", {"sliding_window": "wide"}, "sliding_window='wide' is not an integer"),
    ("qwen2_window", {"layer_types": 3}, "layer_types=3 is not a list of strings"),
    ("qwen2_window", {"layer_types": ["full_attention"]}, "layer_types has 1 entries: must be 3"),
    ("qwen2_window", {"layer_types": 3 * ["linear"]}, "layer_types ['linear'] are not supported, only 'full_attention'"),
    ("qwen2_window", {"max_window_layers": "all"}, "max_window_layers='all' is not an integer"),
    ("qwen3", {"head_dim": 10**6}, "head_dim=1000000 is not an integer in 1..65536"),
    ("gpt2", {"n_embd": 0}, "n_embd=0 is not an integer in 1..2147483647"),
    ("gpt2", {"n_embd": 47}, "4 heads do not divide the hidden size 47"),
    ("gpt2", {"n_layer": 5000}, "n_layer=5000 is not an integer in 1..4096"),
    ("gpt2", {"activation_function": "tanh"}, "activation 'tanh' is not supported; it must be one of"),
    ("gpt2", {"activation_function": ["gelu"]}, "activation ['gelu'] is not supported; it must be one of"),
    ("gpt2", {"layer_norm_epsilon": -1}, "layer_norm_epsilon=-1 is not a finite number in 0..1"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights=False is not supported, only True"),
    ("gpt_neox", {"rotary_pct": 2}, "rotary_pct=2 is not a finite number in 0..1"),
    ("gpt_neox", {"rotary_pct": 0.1}, "rotary_dim must be a positive even number"),
    ("gpt_neox", {"rope_scaling": _LINEAR}, "is not supported in gpt_neox; it must be 'default'"),
    ("gpt_neox", {"rope_parameters": {"partial_rotary_factor": 1e300}}, "rope partial_rotary_factor=1e+300: must lie in 0..1"),
    ("gpt_neox", {"hidden_act": "swish"}, "activation 'swish' is not supported"),
    ("deepseek_v2", {"kv_lora_rank": 0}, "kv_lora_rank=0 is not an integer in 1..65536"),
    ("deepseek_v2", {"n_routed_experts": 10**6}, "n_routed_experts=1000000 is not an integer in 1..65536"),
    ("deepseek_v2", {"num_experts_per_tok": 9}, "experts_per_token=9: must lie in 1..4, the experts of 2 groups"),
    ("deepseek_v2", {"n_group": 3}, "expert_groups=3: must divide the 8 experts"),
    ("deepseek_v2", {"topk_group": 9}, "groups_per_token=9: must lie in 1..4"),
    ("deepseek_v2", {"topk_method": "best"}, "topk_method='best': must be one of"),
    ("deepseek_v2", {"topk_method": ["greedy"]}, "topk_method=['greedy']: must be one of"),
    ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func='sigmoid' is not supported, only 'softmax'"),
    ("deepseek_v2", {"routed_scaling_factor": -1}, "routed_scaling_factor=-1 is not a finite number in 0..inf"),
    ("deepseek_v2_yarn", {"rope_scaling": _YARN | {"factor": INF}}, "rope factor=inf: must be a finite number"),
    ("deepseek_v2_yarn", {"rope_scaling": _YARN | {"beta_slow": 32}}, "beta_slow 32.0, beta_fast 32.0"),
    ("deepseek_v2_yarn", {"rope_scaling": _YARN | {"mscale": 1e300}}, "rope mscale=1e+300: must lie in 0..100"),
    ("deepseek_v2_yarn", {"rope_scaling": _YARN | {"mscale_all_dim": -9}}, "rope mscale_all_dim=-9: must lie in 0..100"),
)


@pytest.mark.parametrize("family, change, words", TABLE, ids=lambda value: str(value)[:60])
def test_fields_of_a_config(family, change, words, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES[family] | change))
    refused(lambda: open_hf_directory(tmp_path), "config.json: ", words)


@pytest.mark.parametrize("eos", ("end", -1, [None], 1.5, {}, [[2]]))
def test_end_tokens_of_a_generation_config(eos, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama2"]))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    refused(lambda: open_hf_directory(tmp_path), "generation_config.json: ", f"eos_token_id={eos!r} is not an integer in 0..")


DEEP = 100_000
TEXTS = (
    (b"", "not valid JSON"), (b"[]", "a JSON object is expected, got a list"), (b"5", "got an integer"),
    (b"1e999", "got a number"), (b"true", "got true or false"), (b"null", "got null"), (b'"x"', "got a string"),
    (b"[" * DEEP, "nested too deeply"), (b'{"a":' * DEEP, "nested too deeply"), (b"[" * DEEP + b"]" * DEEP, "nested too deeply"),
    (b'{"a":' + b"[" * 70 + b"]" * 70 + b"}", "nested too deeply, more than 64 levels"), (b'{"a": 1', "not valid JSON"),
    (b"\xef\xbb\xbf{}", "not valid JSON"), (b"9" * 5000, "not valid JSON"), (b"\xff\xfe{}", "not valid JSON"),
    (b"{'a': 1}", "not valid JSON"), (b"{} {}", "not valid JSON"), (b"\0" * 100, "not valid JSON"),
)


@pytest.mark.parametrize("content, words", TEXTS, ids=lambda value: str(value)[:24])
def test_a_file_that_is_no_json_object(content, words, tmp_path):
    (tmp_path / "x.json").write_bytes(content)
    refused(lambda: read_json_object(tmp_path / "x.json"), "x.json: ", words)
