"""What the net holds: models, and the methods that run on each, as specs.

Ranks and budgets are counts: a fraction may be rounded otherwise one day. They are small enough that of prompts of 96 tokens
something is really compressed.
"""

import dataclasses
from collections.abc import Iterator

from goldens.tiny_models import DEEPSEEK
from helpers import PLAIN, QWEN, WINDOWED

from lowrank_kv_jax.models import ModelConfig, read_config

PROMPT, CAPACITY, BLOCK = 96, 160, 16


def _llama(kv_heads: int, q_heads: int, layers: int = 2) -> ModelConfig:
    return dataclasses.replace(
        PLAIN, q_heads=q_heads, kv_heads=kv_heads, num_layers=layers, windows=(None,) * layers
    )


MODELS = {
    "kv3": _llama(3, 6),
    "kv8": _llama(8, 16),
    "deep": _llama(3, 6, layers=4),  # for methods that work on groups of layers
    "window": WINDOWED,  # 24 tokens in the first layer
    "qwen3": QWEN,
    "mla": dataclasses.replace(read_config(DEEPSEEK["deepseek_v2_lite"]), context=512),
}

ENDS = "sinks=4,recent=8"
BUDGET = f"budget=24,{ENDS}"

# every method with its defaults
CODECS = {
    "eigen-n": "eigen-n:rank=4",
    "eigenattention": "eigenattention:rank=4",
    "kivi": "kivi:recent=8",
    "ojakv": f"ojakv:rank=4,{ENDS}",
    "osp-static": f"osp-static:rank=4,{ENDS}",
    "palu": f"palu:rank=12,{ENDS}",
    "single-svd": f"single-svd:rank=12,{ENDS}",
    "static-pca": "static-pca:rank=4",
    "static-pca-h": f"static-pca-h:rank=4,{ENDS}",
    "streamingkv": f"streamingkv:rank=12,{ENDS}",
    "xkv": f"xkv:rank=10,{ENDS}",
}
SELECTIONS = {
    "adakv": f"adakv:{BUDGET}",
    "h2o": "h2o:budget=24,sinks=4",
    "kvzip": "kvzip:budget=24",
    "momentkv": f"momentkv:{BUDGET}",
    "pyramidkv": f"pyramidkv:{BUDGET}",
    "scissorhands": f"scissorhands:{BUDGET}",
    "sliding-window": "sliding-window:budget=24",
    "snapkv": f"snapkv:{BUDGET}",
    "streamingllm": "streamingllm:budget=24",
}
ALONE = {
    "full": "full",
    "minicache": "minicache",
    "osp": f"osp:rank=4,{ENDS},chunk_length=32",
    "shadowkv": f"shadowkv:rank=12,budget=24,outliers=2,{ENDS}",
    "transform": f"transform:bits=3,{ENDS}",
}
DEFAULTS = CODECS | SELECTIONS | ALONE

# presets; a budget must exceed the recent tokens that the preset names
WINDOW_PRESETS = [
    f"{name}:{preset},budget={budget}"
    for name in ("adakv", "momentkv", "pyramidkv", "snapkv")
    for preset, budget in {"paper": 40, "longbench": 40, "kvpress": 72, "kvcache-factory": 24}.items()
]
STREAMING_PRESETS = [
    f"streamingkv:{preset},rank=12,rank_multiple=4"
    for preset in (
        "paper", "longbench-llama-2-7b-30", "longbench-llama-2-7b-50", "longbench-longchat-7b-v1.5-30",
        "longbench-longchat-7b-v1.5-50", "longbench-mistral-7b-instruct-v0.2-30",
        "longbench-mistral-7b-instruct-v0.2-50", "ruler-llama-2-7b-50", "ruler-mistral-7b-instruct-v0.2-50",
    )
]
PRESETS = {
    "kv3": [*WINDOW_PRESETS, f"ojakv:paper,rank=4,{ENDS}", "single-svd:paper,rank=12", "kivi:int8",
            "shadowkv:paper,rank=12,budget=24,outliers=2"],
    "kv8": ["palu:paper,rank=12,rank_multiple=4", *STREAMING_PRESETS],
    "deep": ["transform:kvtc,bits=3,recent=8"],
}

# fields that take another path
OPTIONS = {
    "kv3": [
        f"static-pca-h:rank=4,{ENDS},rope=pre",
        f"static-pca-h:rank=4,{ENDS},bits=8",
        f"static-pca-h:rank=4,{ENDS},bits=4",
        f"static-pca-h:rank=4,{ENDS},bits=2,rope=pre",
        f"static-pca-h:rank_k=9,rank_v=15,{ENDS},heads=joint",
        f"static-pca-h:rank=4,{ENDS},decoded=exact",
        f"static-pca-h:rank=4,{ENDS},recent_of=prompt,order=reconstruct",
        f"static-pca-h:energy=0.8,{ENDS}",
        f"ojakv:rank=12,{ENDS},rope=pre,heads=joint",
        f"ojakv:rank=4,{ENDS},estimator=frequent_directions",
        f"ojakv:rank=4,{ENDS},transport=false",
        f"ojakv:rank=4,{ENDS},bits=8",
        f"osp:rank=4,{ENDS},chunk_length=32,rope=pre,rotary=true",
        f"osp:rank=4,{ENDS},chunk_length=32,min_chunk=8,tau_k=0.3,tau_v=0.3,reuse=0.9",
        f"osp:rank=4,{ENDS},chunk_length=32,bits=8,basis_dtype=int8,gamma=sqrt_rank",
        f"osp:rank=4,{ENDS},chunk_length=32,estimator=frequent_directions,lookahead=0,prior=0.0",
        f"osp-static:energy=0.8,{ENDS},head_ranks=own",
        f"single-svd:rank=12,{ENDS},decoded=coded,rope=post",
        "kivi:bits=4,recent=8",
        "kivi:bits=8,keys=per_token,group=8,sinks=4,recent=8",
        "kivi:bits=none,recent=8",
        f"snapkv:{BUDGET},positions=cache",
        f"snapkv:budget_bytes=16000,{ENDS}",
        f"snapkv:keep=0.4,{ENDS},decay=0.0,window=16,pool=none",
        "h2o:budget=24,sinks=4,positions=cache",
        f"adakv:{BUDGET},positions=cache",
        f"adakv:{BUDGET},allocation=kvpress",
        f"adakv:budget_bytes=16000,{ENDS}",
        f"momentkv:{BUDGET},schedule=paper",
        f"momentkv:{BUDGET},schedule=paper,decoding=keep",
        f"momentkv:{BUDGET},mi=false",
        f"momentkv:{BUDGET},nc=false",
        f"momentkv:{BUDGET},order=gaussian",
        f"momentkv:{BUDGET},prefill=literal,moments_dtype=bfloat16,allocation=uniform",
        f"pyramidkv:{BUDGET},allocation=kvpress",
        "kvzip:budget=24,allocation=uniform",
        "kvzip:budget=24,layers=uniform",
        "kvzip:keep=0.4",
        "streamingllm:budget=24,positions=original",
    ],
    "kv8": [
        f"palu:rank=16,{ENDS},hadamard=true,bits=4",
        f"palu:rank=4,{ENDS},head_group=1,mean=false",
        f"streamingkv:rank=12,{ENDS},form=encoder,update=joint",
        f"streamingkv:rank=12,{ENDS},transport=false,bits=8",
        f"transform:bits=3,{ENDS},heads=per_head,rope=post+{SELECTIONS['adakv']}",
        f"transform:smaller=1,{ENDS}+{SELECTIONS['kvzip']}",
    ],
    "deep": [
        f"xkv:group=2,rank=10,{ENDS}",
        f"xkv:group=1,rank=10,{ENDS}",
        f"xkv:group=3,rank=10,{ENDS}",
        "xkv:group=2,rank=10,sinks=0,recent=0",
        f"xkv:group=2,table=8:12/9:14,{ENDS}",
        f"xkv:group=2,smaller=1.2,{ENDS}",
        f"xkv:group=2,rank=10,{ENDS},bits=8,basis_dtype=int8",
        f"xkv:group=2,rank=10,{ENDS},rebuild=32,rebuild_block=8",
        f"xkv:group=2,rank=10,{ENDS},recompress=16",
        f"xkv:group=2,rank=10,{ENDS},recompress=16,refit=false",
        "minicache:budget=24,start=1",
        "minicache:keep=0.1,retain=similar",
        f"transform:bits=2,{ENDS},group=3",
    ],
}

ON_WINDOW = ("ojakv", "eigenattention", "kivi", "palu", "streamingkv", "single-svd", "static-pca-h", "xkv", "osp",
             "minicache", "full", "adakv", "h2o", "kvzip", "momentkv", "sliding-window", "snapkv", "streamingllm")
ON_QWEN3 = ("full", "kivi", "ojakv", "osp", "single-svd", "static-pca-h", "streamingkv", "xkv", "kvzip", "snapkv")
LATENTS = ["full", f"xkv:group=3,rank=20,{ENDS}", "xkv:group=2,rank=20,sinks=0,recent=0",
           f"xkv:group=3,rank=20,{ENDS},bits=8,basis_dtype=int8", "minicache", f"snapkv:{BUDGET}"]


def compositions() -> Iterator[tuple[str, str]]:
    """Every codec with every selection, with and without moments of the rest; those that are refused too."""
    for name, codec in CODECS.items():
        model = "deep" if name == "xkv" else "kv8"
        codec = f"{codec},decoded=coded" if name == "single-svd" else codec
        codec = f"{codec},group=2" if name == "xkv" else "kivi:bits=4" if name == "kivi" else codec
        same = name in ("eigen-n", "eigenattention", "static-pca")  # static-pca-h but for their settings
        keeps = name in ("kivi", "xkv")  # refuse to choose again while decoding
        for rule, selection in SELECTIONS.items():
            keep = "" if rule in ("kvzip", "sliding-window", "streamingllm") else ",decoding=keep"
            yield model, f"{codec}+{selection}{keep if keeps else ''}"
            if not same:
                yield model, f"{codec}+{selection}{keep}+moments"
            if name in ("static-pca-h", "palu") and rule == "snapkv":
                yield model, f"{codec}+{selection}+moments"
                yield model, f"{codec}+{selection}{keep}"
    for selection in SELECTIONS.values():
        yield "kv8", f"{selection}+moments"
    yield "kv3", f"snapkv:{BUDGET}+moments:order=gaussian,dtype=bfloat16"
    yield "kv3", f"{CODECS['static-pca-h']},bits=8+{SELECTIONS['snapkv']}"
    yield "kv3", f"ojakv:paper,rank=4,{ENDS}+{SELECTIONS['snapkv']}"
    yield "kv3", f"{CODECS['palu']}+{SELECTIONS['snapkv']}"
    yield "window", f"{CODECS['static-pca-h']}+{SELECTIONS['snapkv']}+moments"
    yield "window", f"kivi:bits=4+{SELECTIONS['kvzip']}+moments"


def cases() -> list[str]:
    """Names of all cases, `model spec`, in the order they are recorded: by model, so that programs are shared."""
    found = [(model, spec) for model in ("kv3", "kv8") for spec in DEFAULTS.values()]
    found += [("deep", DEFAULTS[name]) for name in ("minicache", "pyramidkv", "xkv")]
    found += [("window", DEFAULTS[name]) for name in ON_WINDOW]
    found += [("qwen3", DEFAULTS[name]) for name in ON_QWEN3]
    found += [("mla", spec) for spec in LATENTS]
    found += [(model, spec) for table in (PRESETS, OPTIONS) for model, specs in table.items() for spec in specs]
    found += compositions()
    order = list(MODELS)
    return [f"{model} {spec}" for model, spec in sorted(found, key=lambda case: order.index(case[0]))]
