"""What is asked, as the ids that an engine takes."""

from typing import Any

from lowrank_kv_jax.serving.http.asked import Asked
from lowrank_kv_jax.serving.http.refusal import Refusal

Ids = tuple[int, ...]


def encode(tokenizer: Any, asked: Asked, longest: int) -> tuple[Ids | None, Ids]:
    """The prefix, if there is one, and the prompt.

    Args:
        longest: tokens of the first of them, at most.

    Raises:
        Refusal: 400, a prompt that is too long, or a chat that the model has no template for.
    """
    chat = isinstance(asked.prompt, tuple) and bool(asked.prompt) and isinstance(asked.prompt[0], dict)
    prefix = None if asked.prefix is None else ids_of(tokenizer, asked.prefix)
    text: Any = chat_text(tokenizer, asked.prompt) if chat else asked.prompt
    prompt = ids_of(tokenizer, text, special=not chat and prefix is None) if isinstance(text, str) else text
    for field, ids in (("prefix", prefix), ("messages" if chat else "prompt", prompt)):
        if ids is None:
            continue
        if not ids:
            raise Refusal(400, f"{field}: has no token, at least one is needed", param=field, code="invalid_value")
        if len(ids) > longest and (prefix is None or field == "prefix"):
            raise Refusal(400, f"{field}: has {len(ids)} tokens, must be at most {longest} (--prompt)", param=field,
                          code="context_length_exceeded")
    return prefix, prompt


def ids_of(tokenizer: Any, text: str, special: bool = True) -> Ids:
    """A text as ids, with the tokens that open a sequence or without."""
    return tuple(tokenizer(text, add_special_tokens=special, verbose=False).input_ids)


def chat_text(tokenizer: Any, turns: Any) -> str:
    """Turns in the model's chat template, up to where the model answers.

    Raises:
        Refusal: 400, there is no template, or it fails: it is a program of the model's, with errors of its own.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise Refusal(400, "messages: this model's tokenizer has no chat template, ask /v1/completions", param="messages",
                      code="no_chat_template")
    try:
        return tokenizer.apply_chat_template(list(turns), tokenize=False, add_generation_prompt=True)
    except Exception as error:
        line = " ".join(str(error).split())
        raise Refusal(400, f"messages: the model's chat template refuses them ({type(error).__name__}: {line})",
                      param="messages", code="invalid_value") from error
