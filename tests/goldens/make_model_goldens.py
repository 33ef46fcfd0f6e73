"""Write the golden arrays of the model tests with transformers on torch (CPU).

Run in an environment with torch, transformers and accelerate:

    python tests/goldens/make_model_goldens.py [path of SmolLM2-135M-Instruct.Q4_1.gguf]
"""

import json
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from texts import TEXTS, sentencepiece_vocabulary
from tiny_models import CONFIGS, PREFILL, random_tensor, random_tokens
from tokenizers import normalizers, pre_tokenizers

HERE = Path(__file__).parent
LICENSE = HERE.parents[1] / "LICENSE"
BLOCK_TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")  # what transformers reads


def tiny_logits(name: str) -> dict[str, np.ndarray]:
    config = transformers.AutoConfig.for_model(**CONFIGS[name])
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    model.load_state_dict(
        {
            key: torch.from_numpy(random_tensor(key, tuple(value.shape)))
            for key, value in model.state_dict().items()
            if not (config.tie_word_embeddings and key == "lm_head.weight")
        },
        strict=False,
    )
    model.tie_weights()
    tokens = random_tokens(config.vocab_size)
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens).long()).logits.numpy()
    return {f"{name}/tokens": tokens, f"{name}/logits": logits, f"{name}/prefill": np.int32(PREFILL)}


def smollm2(path: Path) -> dict[str, np.ndarray]:
    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    tokens = tokenizer(LICENSE.read_text()).input_ids[:512]
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0].numpy()
        greedy, step, cache = [], torch.tensor([tokens]), None
        margins = []
        for _ in range(64):
            out = model(step, past_key_values=cache, use_cache=True)
            cache, top = out.past_key_values, out.logits[0, -1].topk(2)
            greedy.append(int(top.indices[0]))
            margins.append(float(top.values[0] - top.values[1]))
            step = top.indices[:1].reshape(1, 1)
        exact = model.double()(torch.tensor([tokens])).logits[0].float().numpy()
    print("transformers in float32 against float64:", np.abs(logits - exact).max())
    positions, columns = np.r_[0:512:24, 511], np.arange(0, logits.shape[1], 24)
    top = np.sort(logits, axis=-1)
    print("smallest top-2 margins", min(margins), float((top[:, -1] - top[:, -2]).min()))
    as_read = {text: tokenizer(text).input_ids for text in TEXTS}
    # transformers does not know the pre-tokenizer "smollm" and cuts as GPT-2 does; the tokenizer.json that
    # SmolLM2 was published with also sets every numeral apart, which shows on numerals outside 0-9
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    ids = {text: tokenizer(text).input_ids for text in TEXTS}
    others = {
        kind: {text: backend.encode(text).ids for text in TEXTS} for kind, backend in backends(path).items()
    }
    chat = [{"role": "user", "content": "What is 2+2?"}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    (HERE / "smollm2_tokens.json").write_text(
        json.dumps({"as_read": as_read, "ids": ids, "chat": rendered, "others": others}, indent=0)
    )
    return {
        "tokens": np.array(tokens, np.int32),
        "positions": positions,
        "columns": columns,
        "logits": logits[np.ix_(positions, columns)],
        "argmax": logits.argmax(-1).astype(np.int32),
        "greedy": np.array(greedy, np.int32),
    }


def backends(path: Path) -> dict:
    """Tokenizers of the other kinds: SmolLM2's vocabulary cut as Llama 3 and Qwen 2 do, and SentencePiece."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import (
        convert_gguf_tokenizer,
        get_gguf_tokenizer,
    )

    _, described, _ = get_gguf_tokenizer(str(path))
    tokens, scores, types = sentencepiece_vocabulary()
    kinds = {kind: described | {"pre_tokenizer_type": kind} for kind in ("llama-bpe", "qwen2")}
    kinds["llama"] = {
        "tokenizer_type": "llama",
        "tokens": tokens,
        "scores": scores,
        "token_type": types,
        "unk_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    made = {kind: convert_gguf_tokenizer("llama", entry)[0] for kind, entry in kinds.items()}
    made["qwen2"].normalizer = normalizers.NFC()  # as in the tokenizer.json of Qwen 2 and 3
    return made


def quantised_blocks() -> dict[str, np.ndarray]:
    """Random blocks of each type, and their values by transformers' torch dequantisation."""
    from transformers.integrations.gguf.dequant import dequantize

    rng, arrays = np.random.default_rng(0), {}
    for kind in BLOCK_TYPES:
        quant = gguf.GGMLQuantizationType[kind]
        _, block_bytes = gguf.GGML_QUANT_SIZES[quant]
        rows = rng.integers(0, 256, (64, block_bytes), dtype=np.uint8)
        finite = np.isfinite(gguf.dequantize(rows, quant)).all(axis=1)
        rows = rows[finite][:4].reshape(2, -1)
        arrays[f"{kind}/bytes"] = rows
        arrays[f"{kind}/values"] = dequantize(torch.from_numpy(rows), quant).float().numpy()
    return arrays


if __name__ == "__main__":
    tiny = {}
    for family in CONFIGS:
        tiny |= tiny_logits(family)
    np.savez_compressed(HERE / "tiny_models.npz", **tiny)
    np.savez_compressed(HERE / "quantised_blocks.npz", **quantised_blocks())
    if len(sys.argv) > 1:
        np.savez_compressed(HERE / "smollm2.npz", **smollm2(Path(sys.argv[1]).resolve()))
