"""What a body of OpenAI's API asks: fields checked one by one, and told by name where they cannot be kept to."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from lowrank_kv_jax.checks.shown import short
from lowrank_kv_jax.serving.http.refusal import Refusal
from lowrank_kv_jax.serving.requests import MOST_SEED, MOST_STOPS

COMPLETION_TOKENS = 16
"""Of an answer, where a completion does not say how many: OpenAI's own default. A chat takes what there is room for."""

Turns = tuple[dict[str, str], ...]

_KINDS = {str: "a string", int: "an integer", float: "a number", bool: "true or false", dict: "an object", list: "a list"}

_ALONE: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "echo": (False,), "suffix": ("",), "presence_penalty": (0,), "frequency_penalty": (0,),
    "logit_bias": ({},), "logprobs": (False,), "top_logprobs": (0,), "tools": ([],), "tool_choice": ("none", "auto"),
    "functions": ([],), "function_call": ("none", "auto"), "response_format": ({"type": "text"},),
    "modalities": (["text"],), "audio": (), "prediction": (), "web_search_options": (), "reasoning_effort": ("none",),
    "verbosity": (),
}
"""Fields that have no effect here, with the values that want none; null is always one."""

_UNREAD: dict[str, tuple[type, ...]] = {
    "user": (str,), "metadata": (dict,), "store": (bool,), "service_tier": (str,), "safety_identifier": (str,),
    "prompt_cache_key": (str,), "prompt_cache_retention": (str,), "parallel_tool_calls": (bool,),
}
"""Fields that change no answer."""

_READ = ("model", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stream", "stream_options")
_OF_COMPLETIONS = ("prompt", "prefix", "best_of", "echo", "suffix")
_OF_CHATS = ("messages", "max_completion_tokens")
_ROLES = ("system", "developer", "user", "assistant")


@dataclasses.dataclass(frozen=True)
class Asked:
    """A body that can be answered.

    Attributes:
        prompt: a text, ids, or the turns of a chat.
        prefix: a text before the prompt that is compressed on its own.
        tokens: of the answer at most; None: nothing is said of it.
        tokens_by_default: then, where there is room for them; None: what there is room for.
        tokens_field: the field that says so.
        drawing: temperature, top_k, top_p and seed (None: any), as of `Request`.
        stop: texts.
        stream: whether tokens are told as they come.
        usage: whether a stream ends with counts.
    """

    prompt: str | tuple[int, ...] | Turns
    prefix: str | None
    tokens: int | None
    tokens_by_default: int | None
    tokens_field: str
    drawing: dict[str, Any]
    stop: tuple[str, ...]
    stream: bool
    usage: bool


def read_asked(body: Any, name: str, chat: bool) -> Asked:
    """What the body of a completion or of a chat asks.

    Args:
        name: of the model that is served.

    Raises:
        Refusal: 400, the first field that cannot be kept to; 404, another model.
    """
    if not isinstance(body, dict):
        raise _wrong(None, f"the body {short(body)}: must be an object")
    own, others = (_OF_CHATS, _OF_COMPLETIONS) if chat else (_OF_COMPLETIONS, _OF_CHATS)
    known = sorted({*_READ, *own, *_ALONE, *_UNREAD} - set(others))
    for field in body:
        if field not in known:
            raise _wrong(field[:64], f"unknown field {short(field)}: allowed are {', '.join(known)}")
    _check_model(body, name)
    for field, values in _ALONE.items():
        _check_alone(body, field, values)
    for field, kinds in _UNREAD.items():
        _get(body, field, *kinds)
    field = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    options = _get(body, "stream_options", dict) or {}
    stream = _get(body, "stream", bool) or False
    if options and not stream:
        raise _wrong("stream_options", f"stream_options={short(options)}: allowed with stream=true only")
    return Asked(
        _turns(body) if chat else _prompt(body), None if chat else _text("prefix", _get(body, "prefix", str)),
        _number(body, field, None, 1, whole=True), None if chat else COMPLETION_TOKENS, field, _drawing(body),
        _stops(body), stream, _get(options, "include_usage", bool) or False,
    )


def _drawing(body: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "temperature": _number(body, "temperature", 1.0, 0, 2), "top_p": _number(body, "top_p", 1.0, 0, 1),
        "top_k": _number(body, "top_k", None, 1, whole=True),
        "seed": _number(body, "seed", None, 0, MOST_SEED, whole=True),
    }


def _check_model(body: Mapping[str, Any], name: str) -> None:
    asked = _get(body, "model", str)
    if asked is None:
        raise _wrong("model", f"the field 'model' is missing: must be {name!r}")
    if asked != name:
        line = f"model={short(asked)}: is not served here, only {name!r}"
        raise Refusal(404, line, param="model", code="model_not_found")


def _check_alone(body: Mapping[str, Any], field: str, values: tuple[Any, ...]) -> None:
    found = body.get(field)
    same = (found == value and isinstance(found, bool) == isinstance(value, bool) for value in values)
    if found is not None and not any(same):
        allowed = " or ".join(("null", *map(json.dumps, values)))
        raise _wrong(field, f"{field}={short(found)}: must be {allowed}, this server has nothing else")


def _get(body: Mapping[str, Any], field: str, *kinds: type) -> Any:
    """A field of one of these types; None where it is null or is not there."""
    found = body.get(field)
    if found is None or isinstance(found, kinds) and (bool in kinds or not isinstance(found, bool)):
        return found
    raise _wrong(field, f"{field}={short(found)}: must be {' or '.join(_KINDS[kind] for kind in kinds)}")


def _number(
    body: Mapping[str, Any], field: str, default: Any, least: float, most: float | None = None, whole: bool = False
) -> Any:
    found = _get(body, field, int) if whole else _get(body, field, int, float)
    if found is None:
        return default
    if found < least or most is not None and found > most:
        allowed = f"at least {least}" if most is None else f"in {least}..{most}"
        raise _wrong(field, f"{field}={short(found)}: must be {allowed}")
    return found


def _text(field: str, value: Any) -> Any:
    """A text, or None.

    Raises:
        Refusal: it is empty, or half a character that only JSON can write.
    """
    if value == "":
        raise _wrong(field, f"{field}='': must be a text that is not empty")
    try:
        (value or "").encode("utf-8")
    except UnicodeEncodeError as error:
        raise _wrong(field, f"{field}={short(value)}: character {error.start} is half of a surrogate pair, which is no "
                            "text") from error
    return value


def _prompt(body: Mapping[str, Any]) -> str | tuple[int, ...]:
    found = _get(body, "prompt", str, list)
    if isinstance(found, list) and len(found) == 1 and isinstance(found[0], str | list):
        found = found[0]  # a batch of one
    if isinstance(found, str):
        return _text("prompt", found)
    if not found or not all(type(token) is int for token in found):
        raise _wrong("prompt", f"prompt={short(found)}: must be a text or its token ids, of one prompt")
    return tuple(found)


def _stops(body: Mapping[str, Any]) -> tuple[str, ...]:
    found = _get(body, "stop", str, list)
    found = [found] if isinstance(found, str) else found or []
    if len(found) > MOST_STOPS or not all(isinstance(stop, str) and stop for stop in found):
        raise _wrong("stop", f"stop={short(found)}: must be a text that is not empty, or at most {MOST_STOPS} of them")
    return tuple(_text("stop", stop) for stop in found)


def _turns(body: Mapping[str, Any]) -> Turns:
    found = _get(body, "messages", list)
    if not found:
        raise _wrong("messages", f"messages={short(found)}: must be a list of at least one message")
    return tuple(_turn(f"messages[{i}]", turn) for i, turn in enumerate(found))


def _turn(place: str, turn: Any) -> dict[str, str]:
    if not isinstance(turn, dict):
        raise _wrong(place, f"{place}={short(turn)}: must be an object with role and content")
    for field, value in turn.items():
        if field not in ("role", "content", "name") and value not in (None, [], {}):
            raise _wrong(place, f"{place}.{field[:64]}={short(value)}: must be null, this server reads role and content")
    role, content = turn.get("role"), turn.get("content")
    if role not in _ROLES:
        raise _wrong(place, f"{place}.role={short(role)}: must be one of {', '.join(_ROLES)}")
    if isinstance(content, list):
        content = "".join(_part(f"{place}.content[{i}]", part) for i, part in enumerate(content))
    if not isinstance(content, str):
        raise _wrong(place, f"{place}.content={short(content)}: must be a text, or a list of parts of the type text")
    if content:
        _text(f"{place}.content", content)
    return {"role": "system" if role == "developer" else role, "content": content}


def _part(place: str, part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise _wrong(place, f"{place}={short(part)}: must be an object of the type text with a text")
    return part["text"]


def _wrong(param: str | None, message: str) -> Refusal:
    return Refusal(400, message, param=param, code="invalid_value")
