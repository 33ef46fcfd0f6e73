"""Answers in the form of OpenAI's API: whole, or as the events of a stream."""

import secrets
import time
from collections.abc import Iterator
from typing import Any

from lowrank_kv_jax.serving.http.asked import Asked
from lowrank_kv_jax.serving.http.engine_thread import Heard
from lowrank_kv_jax.serving.http.refusal import Refusal, as_json
from lowrank_kv_jax.serving.http.words import Words

DONE = "data: [DONE]\n\n"


class Reply:
    """Objects of one answer.

    Args:
        model: the name that is served.
        chat: whether turns were asked.
        prompt_tokens: of the prompt, with its prefix.
        words: the text as it comes.
    """

    def __init__(self, asked: Asked, model: str, chat: bool, prompt_tokens: int, words: Words):
        self._asked, self._chat, self._prompt_tokens, self._words = asked, chat, prompt_tokens, words
        kind = "chat.completion" if chat else "text_completion"
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._head = {"id": self._id, "object": kind, "created": int(time.time()), "model": model}

    def whole(self, heard: Heard) -> dict[str, Any]:
        """Of an answer that has ended well."""
        text = heard.text or ""
        own = {"message": {"role": "assistant", "content": text, "refusal": None}} if self._chat else {"text": text}
        choice = {"index": 0, **own, "logprobs": None, "finish_reason": heard.finish}
        return {**self._head, "choices": [choice], "usage": self._usage(heard)}

    def begin(self) -> Iterator[str]:
        """The events before the first token."""
        if self._chat:
            yield self._event({"role": "assistant", "content": ""}, None)

    def piece(self, heard: Heard) -> Iterator[str]:
        """The events of new tokens, and of the end."""
        ended = heard.finish is not None
        text = self._words.end(heard.text or "") if ended else self._words.add(heard.tokens)
        if text:
            yield self._event({"content": text} if self._chat else text, None)
        if ended:
            yield self._event({} if self._chat else "", heard.finish)
            if self._asked.usage:
                yield _data({**self._chunk, "choices": [], "usage": self._usage(heard)})
            yield DONE

    def _event(self, new: Any, finish: str | None) -> str:
        own = {"delta": new} if self._chat else {"text": new}
        choice = {"index": 0, **own, "logprobs": None, "finish_reason": finish}
        usage = {"usage": None} if self._asked.usage else {}
        return _data({**self._chunk, "choices": [choice], **usage})

    @property
    def _chunk(self) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk"} if self._chat else self._head

    def _usage(self, heard: Heard) -> dict[str, int]:
        new = len(heard.tokens)
        return {"prompt_tokens": self._prompt_tokens, "completion_tokens": new, "total_tokens": self._prompt_tokens + new}


def failed(refusal: Refusal) -> str:
    """The event of a stream that cannot go on."""
    return _data(refusal.body)


def _data(value: Any) -> str:
    return f"data: {as_json(value)}\n\n"
