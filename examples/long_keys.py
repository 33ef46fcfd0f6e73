"""A selection of your own: docs/extending.md, or `lowrank-kv compare --import long_keys --methods long-keys:keep=0.5`."""

import dataclasses

import lowrank_kv_jax as lkv
from lowrank_kv_jax.method import register
from lowrank_kv_jax.selections.budgeted import Budgeted


@register("long-keys")
@dataclasses.dataclass(frozen=True)
class LongKeys(Budgeted):
    """Tokens with the longest values stay."""

    decoding: str = "keep"

    def prompt_scores(self, layout, tap, lengths):   # float32 [B, K, S]: high ones stay
        return (tap.v.astype("float32") ** 2).sum(-1).swapaxes(1, 2)


if __name__ == "__main__":
    model = lkv.load_model("smollm2-135m")
    for spec in ("long-keys:keep=0.5", "kivi:bits=8+long-keys:keep=0.5+moments"):
        out = lkv.generate(model, spec, ["The KV cache is a list of keys and values. " * 6], max_new_tokens=16)
        print(spec, lkv.cache_bytes(out.cache).smaller, out.texts[0])
