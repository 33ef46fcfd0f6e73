"""The tokenizer that a GGUF file describes, rebuilt as a `PreTrainedTokenizerFast`."""

import warnings
from typing import Any

from lowrank_kv_jax.models.gguf_file import GgufFile
from lowrank_kv_jax.models.transformers_tokenizers import fast_tokenizer_class

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type

# How text is cut before merging, by `tokenizer.ggml.pre`. These patterns belong to the vocabularies,
# not to an implementation: another cut gives other tokens than the model was trained on.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_GPT2 = ("gpt-2", "default")
_DIGIT_WISE = ("smollm",)
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
_QWEN2 = ("qwen2", "deepseek-r1-qwen")


def build_tokenizer(file: GgufFile):
    """The tokenizer of a GGUF file, with its special tokens and chat template.

    Raises:
        ValueError: the file has no tokenizer, or one of a kind that is not rebuilt here.
    """
    metadata = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in file.metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    kind = metadata.get("model")
    if not metadata.get("tokens"):
        raise ValueError(f"{file.path}: has no tokenizer (tokenizer.ggml.tokens)")
    if kind == "gpt2":
        backend = _byte_level(file, metadata)
    elif kind == "llama":
        backend = _sentencepiece(metadata)
    else:
        raise ValueError(
            f"{file.path}: tokenizer.ggml.model {kind!r} is not supported; it must be 'gpt2' or 'llama'"
        )
    _add_special_tokens(backend, metadata)
    _frame(backend, metadata)
    return _wrap(backend, metadata, file.metadata)


def _byte_level(file: GgufFile, metadata: dict[str, Any]):
    """Byte-level BPE, as GPT-2, Llama 3, Qwen and SmolLM use it."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    if "pre" not in metadata:
        warnings.warn(f"{file.path}: does not say how text is cut (tokenizer.ggml.pre): it is cut as GPT-2 does, which "
                      "makes another model's answers worse", stacklevel=3)
    pre = metadata.get("pre", "default")
    if pre not in (*_GPT2, *_DIGIT_WISE, *_LLAMA3, *_QWEN2):
        allowed = [*_GPT2, *_DIGIT_WISE, *_LLAMA3, *_QWEN2]
        raise ValueError(
            f"{file.path}: tokenizer.ggml.pre {pre!r} is not supported; it must be one of {allowed}"
        )
    vocab = {token: index for index, token in enumerate(metadata["tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("merges", ())]
    # Llama 3 takes a word that is in the vocabulary as it is, whatever its merges
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _LLAMA3))
    if pre in _GPT2:
        cut = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif pre in _DIGIT_WISE:
        cut = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    else:
        split = Regex(_LLAMA3_SPLIT if pre in _LLAMA3 else _QWEN2_SPLIT)
        cut = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(split, behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    backend.pre_tokenizer = cut
    backend.decoder = decoders.ByteLevel()
    if pre in _QWEN2:
        backend.normalizer = normalizers.NFC()
    return backend


def _sentencepiece(metadata: dict[str, Any]):
    """SentencePiece BPE with byte fallback, as Llama 2 and Mistral use it; merges follow from the scores."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens, scores = metadata["tokens"], metadata["scores"]
    vocab = {token: index for index, token in enumerate(tokens)}
    ranked = []
    for token, score in zip(tokens, scores, strict=True):
        parts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        ranked += [
            (-score, -len(left), left, right) for left, right in parts if left in vocab and right in vocab
        ]
    merges = [(left, right) for _, _, left, right in sorted(ranked, key=lambda entry: entry[:2])]
    backend = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges,
            fuse_unk=True,
            byte_fallback=True,
            unk_token=tokens[metadata.get("unknown_token_id", 0)],
        )
    )
    prefix = metadata.get("add_space_prefix", True)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        prepend_scheme="first" if prefix else "never", split=False
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + [decoders.Strip(content=" ", left=1)] * bool(prefix))
    return backend


def _add_special_tokens(backend, metadata: dict[str, Any]):
    """Tokens matched whole: control tokens (hidden by `skip_special_tokens`) and user-defined ones."""
    from tokenizers import AddedToken

    kinds = metadata.get("token_type") or [0] * len(metadata["tokens"])
    for kind, add, special in (
        (_CONTROL, backend.add_special_tokens, True),
        (_USER_DEFINED, backend.add_tokens, False),
    ):
        chosen = [token for token, entry in zip(metadata["tokens"], kinds, strict=True) if entry == kind]
        add([AddedToken(token, special=special, normalized=False) for token in chosen])


def _frame(backend, metadata: dict[str, Any]):
    """Open a sequence with BOS and close it with EOS, as far as the file asks for it."""
    from tokenizers import processors

    # SentencePiece files and Llama 3's without the flag mean that a sequence opens with BOS
    opens = metadata["model"] == "llama" or metadata.get("pre") in _LLAMA3
    flags = {
        "bos": metadata.get("add_bos_token", opens),
        "eos": metadata.get("add_eos_token", False),
    }
    ids = {name: metadata.get(f"{name}_token_id") for name, wanted in flags.items() if wanted}
    framing = {name: (metadata["tokens"][index], index) for name, index in ids.items() if index is not None}
    if framing:
        opening, closing = framing.get("bos"), framing.get("eos")
        single = [*([opening[0]] if opening else []), "$A", *([closing[0]] if closing else [])]
        backend.post_processor = processors.TemplateProcessing(
            single=single,
            pair=single + [part.replace("$A", "$B") for part in single],
            special_tokens=list(framing.values()),
        )


def _wrap(backend, metadata: dict[str, Any], all_metadata: dict[str, Any]):
    tokens, architecture = metadata["tokens"], all_metadata.get("general.architecture")
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {
        name: tokens[metadata[f"{key}_token_id"]] if metadata.get(f"{key}_token_id") is not None else None
        for name, key in named.items()
    }
    special["pad_token"] = special["pad_token"] or special["eos_token"]
    return fast_tokenizer_class()(
        tokenizer_object=backend,
        **special,
        chat_template=all_metadata.get("tokenizer.chat_template"),
        model_max_length=all_metadata.get(f"{architecture}.context_length", int(1e9)),
        clean_up_tokenization_spaces=False,
    )
